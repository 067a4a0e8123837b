import json
import shutil
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import yaml

from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.uncertainty_feedback import save_uncertainty
from tests.helpers import forked
from tests.helpers.benchmark_rows import write_benchmarks
from tests.helpers.feedback_families import attach_drawn

TASKS = ("arc_easy", "piqa", "winogrande")
PICK = ("--tasks", ",".join(TASKS))
QUESTIONS = [
    {"text": "Once upon a time there was a little", "choices": [" girl", " void"], "gold": 0},
    {"text": "The court ruled that the", "choices": [" girl", " contract"], "gold": 1},
]
HARNESS = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


@pytest.fixture
def data(tmp_path):
    return write_benchmarks(tmp_path / "data", *TASKS)


def test_json_is_the_result_that_is_kept(prism, tiny_model, data, tmp_path):
    out = tmp_path / "out"
    result = prism("eval", tiny_model, *PICK, "--data", data, "--out", out, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads((out / "eval.json").read_text())
    assert [task["task"] for task in found["tasks"]] == list(TASKS)
    assert found["tasks"][0]["chance"] == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert set(found["mean"]) == {"plain", "prototype_only", "residual_only"}
    assert "lm_eval" in found["versions"]
    assert ElementTree.parse(out / "eval.svg").getroot().tag.endswith("svg")
    # A second run asks nothing and prints the table.
    again = prism("eval", tiny_model, *PICK, "--data", data, "--out", out)
    assert again.returncode == 0, again.stderr
    assert "WinoGrande: " not in again.stderr
    for words in ("ARC-Easy", "prototype only", "residual only", "mean", "0-shot"):
        assert words in again.stdout
    refusal = prism("eval", tiny_model, *PICK, "--data", data, "--out", out, "--seed", 1)
    assert refusal.returncode == 2
    assert "seed: 0 → 1" in refusal.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "piqaa"], ["a task of the suite 'seed' is 'piqaa'", "Did you mean 'piqa'"]),
        (["--suite", "glue"], ["suite is 'glue'"]),
        (["--tasks", "boolq"], ["no boolq_dev.parquet", "--tasks"]),
        (["--tasks", "piqa", "--shots", 2], ["no piqa_train.parquet", "--shots 0"]),
        (["--limit", 0], ["'--limit'"]),
        (["--device", "cuda:7"], ["cuda:7"]),
    ],
)
def test_bad_input_is_refused(refused, tiny_model, data, tmp_path, arguments, words):
    message = refused("eval", tiny_model, "--data", data, "--out", tmp_path / "out", *arguments)
    assert all(word in message for word in words), message


def test_what_is_not_a_model_is_refused(refused, data, tmp_path):
    assert "is not a directory" in refused("eval", tmp_path / "nowhere", "--data", data)
    assert "cannot be read" in refused("eval", data, "--data", data, "--out", tmp_path / "out")


@pytest.fixture
def task(tmp_path):
    """A folder with a task of lm-eval over two questions of a file."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    settings = {
        "task": "two_questions",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(lines)},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "two.yaml").write_text(yaml.safe_dump(settings))
    return folder


def harness(model, task, out):
    return (
        *("run", "--model", "hf", "--model_args", f"pretrained={model}", "--device", "cpu"),
        *("--include_path", task, "--tasks", "two_questions", "--output_path", out),
        "--log_samples",
    )


def answers(out):
    (file,) = out.rglob("samples_two_questions_*.jsonl")
    return [
        [float(one[0][0]) for one in json.loads(line)["resps"]]
        for line in file.read_text().splitlines()
    ]


@pytest.fixture
def fed_back(tiny_model, tmp_path):
    """The tiny model with uncertainty feedback, which changes what it predicts."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory, ignore=shutil.ignore_patterns("lens"))
    torch.manual_seed(0)
    save_uncertainty(directory, attach_drawn(read_checkpoint(directory)[0], 256, deviation=0.5))
    return directory


@pytest.mark.slow
def test_lm_eval_reads_a_model_directory_as_it_is_and_through_prism(
    prism, tiny_model, fed_back, task, tmp_path
):
    plain, ours, fed = (tmp_path / name for name in ("plain", "ours", "fed"))
    result = forked.run(*harness(tiny_model, task, plain), code=HARNESS)
    assert result.returncode == 0, result.stderr
    assert "two_questions" in result.stdout
    result = prism("lm-eval", *harness(tiny_model, task, ours))
    assert result.returncode == 0, result.stderr
    assert answers(ours) == answers(plain)
    result = prism("lm-eval", *harness(fed_back, task, fed))
    assert result.returncode == 0, result.stderr
    for read, without in zip(answers(fed), answers(plain), strict=True):
        assert all(abs(a - b) > 1e-2 for a, b in zip(read, without, strict=True))


def test_lm_eval_answers_for_itself(prism):
    result = prism("lm-eval", "run", "--help")
    assert result.returncode == 0, result.stderr
    assert "--model_args" in result.stdout
    assert prism("lm-eval", "run", "--no-such-option").returncode == 2
