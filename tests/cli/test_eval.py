"""prismlm eval and lm-eval."""

import json
import shutil

import pytest
import yaml
from safetensors.torch import load_file, save_file

from prismlm.eval.robustness import read_pairs
from prismlm.interventions.values import Controller
from tests.helpers import forked
from tests.helpers.chat_server import ChatServer
from tests.helpers.eval_data import save_glue_model, write_benchmarks, write_texts, write_toy
from tests.helpers.records import write_jsonl

TASKS = ("arc_easy", "piqa", "winogrande")
QUESTIONS = [
    {"text": "Once upon a time there was a little", "choices": [" girl", " void"], "gold": 0},
    {"text": "The court ruled that the", "choices": [" girl", " contract"], "gold": 1},
]
HARNESS = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


def test_suite(prism, document, refused, tiny_model, tmp_path):
    data, out = write_benchmarks(tmp_path / "data", *TASKS), tmp_path / "out"
    command = ("eval", tiny_model, "--tasks", ",".join(TASKS), "--data", data, "--out", out)
    result = document(*command)
    assert result == json.loads((out / "eval.json").read_text())
    assert [task["task"] for task in result["tasks"]] == list(TASKS)
    assert result["tasks"][0]["chance"] == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert set(result["mean"]) == {"plain", "prototype_only", "residual_only"}
    assert "lm_eval" in result["versions"]
    # A second run asks nothing and prints the table.
    again = prism(*command)
    assert "WinoGrande: " not in again.stderr
    for words in ("ARC-Easy", "prototype", "residual", "stderr", "mean"):
        assert words in again.stdout
    assert "seed: 0 → 1" in refused(*command, "--seed", 1)


@pytest.fixture
def task(tmp_path):
    """A folder with a task of lm-eval over two questions of a file."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = write_jsonl(folder / "rows.jsonl", QUESTIONS)
    files = {"data_files": {"test": str(lines)}, "cache_dir": str(tmp_path / "cache")}
    settings = {
        "task": "two_questions",
        "dataset_path": "json",
        "dataset_kwargs": files,
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
    rows = map(json.loads, file.read_text().splitlines())
    return [[float(answer[0][0]) for answer in row["resps"]] for row in rows]


@pytest.mark.slow
def test_lm_eval_reads_a_model_directory_plainly_and_through_prismlm(
    prism, tiny_model, task, tmp_path
):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    prism(*harness(tiny_model, task, plain), code=HARNESS)
    prism("lm-eval", *harness(tiny_model, task, ours))
    assert answers(ours) == answers(plain)
    turned, out = tmp_path / "c.safetensors", tmp_path / "turned"
    Controller(tuple((i, 0.0) for i in range(64))).save(turned)
    prism("lm-eval", "--controller", turned, *harness(tiny_model, task, out))
    assert answers(out) != answers(plain)


def test_lm_eval_parses_its_own_options(prism):
    assert "--model_args" in prism("lm-eval", "run", "--help").stdout
    assert forked.run("lm-eval", "run", "--no-such-option").returncode == 2


def test_glue(prism, document, tmp_path):
    model, data = save_glue_model(tmp_path / "model"), write_toy(tmp_path / "data", rows=32)
    few = ("--seeds", "0", "--epochs", "1", "--limit", "16", "--learning-rate", "1e-3")
    command = ("eval", "glue", model, "--data", data, "--tasks", "rte,sst2", "--out", tmp_path)
    command = (*command, *few)
    result = document(*command)
    assert result == json.loads((tmp_path / "glue.json").read_text())
    assert [row["title"] for row in result["tasks"]] == ["SST-2", "RTE"]
    assert (result["rate_from"], result["learning_rate"]) == ("given", 1e-3)
    assert "SST-2, seed 0: " not in prism(*command).stderr


def test_an_unusable_judge_is_reported_before_its_ratings(
    prism, document, copy, tiny_model, tiny_corpus, tmp_path
):
    # Other weights, and a name that drives a terminal.
    weights = load_file(copy / "model.safetensors")
    changed = {name: value.flip(0) for name, value in weights.items()}
    save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
    other = copy.rename(tmp_path / "other\x1b[31m")
    few = ("--prompts-count", 4, "--prompt-words", 8, "--new-tokens", 8)
    with ChatServer(lambda request, number: {"verdict": "A"}) as server:
        judge = ("--endpoint", server.url, "--endpoint-model", "m", "--out", tmp_path)
        command = ("eval", "judge", tiny_model, other, "--corpus", tiny_corpus, *few, *judge)
        result = prism(*command)
        requests = len(server.requests)
        value = document(*command)
        assert len(server.requests) == requests <= 32
    assert result.stdout.startswith("The judge endpoint:m is unusable: it must prefer real text")
    assert "Ratings, to be ignored since the judge is unusable" in result.stdout
    assert "\x1b[31m" not in result.stdout + result.stderr
    assert value == json.loads((tmp_path / "judge.json").read_text())
    assert value["judge"]["order"]["by_position"]["value"] == 1
    assert [row["rating"]["value"] for row in value["ratings"]["models"]] == [1000, 1000]


def test_lines_of_a_file_are_continued_without_a_judge(prism, refused, tiny_model, tmp_path):
    model, prompts = shutil.copytree(tiny_model, tmp_path / "model"), tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nThe court ruled\n")
    command = ("eval", "judge", model, "--prompts", prompts, "--new-tokens")
    shown = prism(*command, 4).stdout
    assert "2 prompts, 1 models" in shown
    assert "BLEU" not in shown
    out = model / "eval" / "judge"
    (part,) = (out / "continuations").iterdir()
    assert len(json.loads(part.read_text())) == 2
    assert (out / "continuations.parquet").is_file()
    assert "tokens: 4 → 5" in refused(*command, 5)
    prompts.write_text("Once upon a time\nThe court said\n")
    assert "prompts: " in refused(*command, 4)


def test_pairs(document, refused, tmp_path):
    pairs = ("eval", "pairs", "--out", tmp_path / "out", "--data", write_texts(tmp_path / "data"))
    few, file = ("--per-slice", 1, "--similarity", 0.5), tmp_path / "out" / "perturbations.parquet"
    result = document(*pairs, *few)
    assert [row["pairs"] for row in result["slices"]] == [1] * 10
    assert result["similarity"] == 0.5
    assert len(read_pairs(file)) == 7
    before = file.read_bytes()
    assert "replace it with --overwrite" in refused(*pairs, *few)
    assert file.read_bytes() == before


def test_robustness(prism, document, studied, tmp_path):
    pairs, out = studied / "pairs.parquet", tmp_path / "result.json"
    command = ("eval", "robustness", *(studied / kind for kind in ("protot", "llama", "gpt2")))
    result = document(*command, "--pairs", pairs, "--out", out)
    assert result == json.loads(out.read_text())
    assert [model["name"] for model in result["models"]] == ["protot", "llama", "gpt2"]
    assert result["slices"][3]["pairs"] == 7
    shown = prism(*command, "--pairs", pairs, "--limit", 3).stdout
    assert "mean entropy matched to " in shown


@pytest.mark.parametrize(("kind", "routing"), [("protot", "channels"), ("gpt2", "attention")])
def test_clamping(prism, document, studied, tmp_path, kind, routing):
    command = ("eval", "clamping", studied / kind, "--pairs", studied / "pairs.parquet")
    out = tmp_path / "result.json"
    assert f"PMR: {kind}, {routing} clamped" in prism(*command, "--out", out).stdout
    result = json.loads(out.read_text())
    assert result["slices"][0]["clamped"]["pairs"] == 6
    assert document(*command) == result
