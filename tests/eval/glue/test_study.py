import json
from dataclasses import replace

import numpy as np
import pytest

from prismlm.errors import FormatError, InputError
from prismlm.eval.glue.data import TASKS
from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions
from prismlm.eval.glue.study import (
    METRICS,
    answers,
    constant,
    interval,
    measure,
    run_glue,
    search,
    server_file,
    with_rate,
)
from tests.helpers.glue_rows import save_glue_model, write_rows, write_toy

BY_NAME = {task.name: task for task in TASKS}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    families = ("llama", "gpt2", "protot")
    return {f: GlueModel(save_glue_model(directory / f, f)) for f in families}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data"))


@pytest.fixture
def quick(data):
    return GlueOptions(data=data, limit=16, dev_limit=8, learning_rate=5e-3, warmup=0.1, epochs=1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "protot"])
def test_a_learnable_task_is_learned(models, data, tmp_path, family):
    options = GlueOptions(data=data, learning_rate=5e-3, warmup=0.1)
    both = family == "llama"
    seeds = [0, 1] if both else [0]
    result = run_glue(models[family], tmp_path, options, ["sst2"], seeds, from_scratch=both)
    assert result == json.loads((tmp_path / "glue.json").read_text())
    (row,) = result["tasks"]
    assert row["constant"] == {"accuracy": 0.5}
    for arm in ("fine_tuned", "from_scratch")[: 1 + both]:
        assert row[arm]["seeds"] == seeds
        assert row[arm]["mean"]["accuracy"] > 0.9
    assert row["fine_tuned"]["low"] <= row["fine_tuned"]["mean"]["accuracy"]
    assert row["train"] == {"rows": 128, "where": "sst2_train_subset.parquet"}
    for seed in seeds:
        lines = (tmp_path / "predictions" / str(seed) / "SST-2.tsv").read_text().splitlines()
        rows = [line.split("\t") for line in lines]
        assert rows[0] == ["index", "prediction"]
        assert [index for index, _ in rows[1:]] == ["0", "1", "2", "3", "4"]
        assert sum(answer == "01"[n % 2] for n, (_, answer) in enumerate(rows[1:])) >= 4


def test_scores_are_fitted_and_missing_test_sets_are_left_out(models, tmp_path):
    rows = [
        {"sentence1": "a " * (1 + row % 4) + "good", "sentence2": "b", "score": 1.0 + row % 4}
        for row in range(64)
    ]
    for split in ("train", "dev"):
        write_rows(tmp_path / "data", f"stsb_{split}_subset", rows)
    options = GlueOptions(data=tmp_path / "data", learning_rate=1e-2, warmup=0.1, epochs=6)
    (row,) = run_glue(models["llama"], tmp_path / "out", options, ["stsb"], [0])["tasks"]
    assert row["fine_tuned"]["mean"]["pearson"] > 0.8
    assert row["from_scratch"] is None
    assert not (tmp_path / "out" / "predictions").exists()


def test_other_settings_another_model_and_damaged_runs_are_refused(models, quick, tmp_path):
    run_glue(models["llama"], tmp_path, quick, ["sst2"], [0])
    other = replace(quick, learning_rate=1e-4)
    with pytest.raises(InputError, match=r"learning_rate: 0.005 → 0.0001"):
        run_glue(models["llama"], tmp_path, other, ["sst2"], [0])
    with pytest.raises(InputError, match=r"runs with other settings \(model: .*--out"):
        run_glue(models["gpt2"], tmp_path, quick, ["sst2"], [0])
    path = tmp_path / "runs" / "sst2-0.json"
    run = json.loads(path.read_text())
    for damaged in ({"task": "sst2"}, run | {"measured": {"dev": {"gold": ["x"]}}}, [run]):
        path.write_text(json.dumps(damaged))
        with pytest.raises(FormatError, match=r"sst2-0\.json"):
            run_glue(models["llama"], tmp_path, quick, ["sst2"], [0])


def test_a_search_is_stored_and_used(models, tmp_path):
    data, out, lm = write_toy(tmp_path / "data"), tmp_path / "out", models["llama"]
    labels = ("entailment", "neutral", "contradiction")
    mnli = [{"premise": "abc"[n % 3], "hypothesis": "x", "label": labels[n % 3]} for n in range(48)]
    for split in ("train", "dev"):
        write_rows(data, f"mnli_{split}_subset", mnli)
    options, rates = GlueOptions(data=data, limit=48), (1e-9, 1e-2)
    assert with_rate(lm, out, options)[1] == "the source's"
    result = search(lm, out, options, rates=rates)
    assert result["learning_rate"] == 1e-2
    assert [(row["learning_rate"], row["warmup"]) for row in result["tried"]] == [
        (1e-9, 0.06), (1e-9, 0.1), (1e-2, 0.06), (1e-2, 0.1)
    ]  # fmt: skip
    best = max(result["tried"], key=lambda row: row["sst2"] + row["mnli"])
    assert result["warmup"] == best["warmup"]
    searched = replace(options, learning_rate=1e-2, warmup=best["warmup"])
    assert with_rate(lm, out, options) == (searched, "searched")
    explicit, rate_from = with_rate(lm, out, replace(options, learning_rate=3e-4))
    assert explicit == replace(searched, learning_rate=3e-4)
    assert rate_from == "given"
    # It is not used for another model.
    with pytest.raises(FormatError, match="of another version or damaged"):
        with_rate(models["gpt2"], out, options)
    (out / "search" / "runs" / "sst2-0-0.01-0.1.json").write_text('{"task": "sst2"}')
    with pytest.raises(FormatError, match=r"0\.1\.json is not what a run writes"):
        search(lm, out, options, rates=rates)


@pytest.mark.parametrize(
    ("task", "predictions", "rows"),
    [
        ("rte", [1, 0], "0\tnot_entailment\n1\tentailment\n"),
        ("cola", [1], "0\t1\n"),
        ("mnli", [1], "0\tneutral\n"),
        ("stsb", [2.5], "0\t2.500\n"),
    ],
)
def test_files_for_the_server(task, predictions, rows):
    assert server_file(BY_NAME[task], predictions) == f"index\tprediction\n{rows}"


GOLD = np.array([1, 1, 1, 0, 0, 0, 0, 1])
PREDICTED = np.array([1, 1, 0, 0, 0, 0, 1, 1])  # tp 3, fn 1, fp 1, tn 3


@pytest.mark.parametrize(
    ("task", "gold", "predicted", "expected"),
    [
        ("rte", GOLD, PREDICTED, {"accuracy": 6 / 8}),
        ("mrpc", GOLD, [1, 1, 0, 0, 0, 0, 0, 0], {"f1": 2 * 2 / (4 + 2), "accuracy": 6 / 8}),
        # (3·3 − 1·1) / √(4·4·4·4)
        ("cola", GOLD, PREDICTED, {"matthews": 8 / 16}),
        # Σ xy / √(Σ x² Σ y²), with x = −2, −1, 0, 3 and y = −1.375, −0.375, 0.625, 1.125
        ("stsb", [0.0, 1.0, 2.0, 5.0], [1.0, 2.0, 3.0, 3.5],
         {"pearson": 6.5 / np.sqrt(14 * 3.6875), "spearman": 1.0}),
        ("cola", GOLD, np.ones(8), {"matthews": 0}),
        ("stsb", GOLD, np.ones(8), {"pearson": 0, "spearman": 0}),
        ("mrpc", GOLD, np.zeros(8), {"f1": 0, "accuracy": 0.5}),
    ],
)  # fmt: skip
def test_metrics_by_hand(task, gold, predicted, expected):
    result = measure(BY_NAME[task], np.array(gold), np.array(predicted))
    assert result == pytest.approx(expected)


def test_a_constant_answer():
    gold = np.array([0, 0, 0, 1])
    assert constant("accuracy", gold) == 3 / 4
    assert constant("f1", gold) == 2 * 1 / (4 + 1)  # always 1
    assert constant("matthews", gold) == constant("pearson", gold) == 0


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews", "pearson"])
def test_an_interval_contains_the_mean_of_the_metric(metric):
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 2, 200)
    predicted = [np.where(rng.random(200) < 0.8, gold, 1 - gold) for _ in range(2)]
    spread = interval(metric, gold, predicted)
    assert spread.value == pytest.approx(np.mean([METRICS[metric](gold, p) for p in predicted]))
    assert spread.low < spread.value < spread.high < spread.low + 0.3


def test_outputs_become_classes_or_scores_within_their_range():
    assert answers(BY_NAME["mnli"], np.array([[0, 2, 1], [3, 0, 0]])).tolist() == [1, 0]
    assert answers(BY_NAME["stsb"], np.array([[-0.5], [2.5], [7]])).tolist() == [0, 2.5, 5]
