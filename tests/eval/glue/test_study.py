import json
from dataclasses import replace

import pytest

from prismlm.errors import FormatError, InputError
from prismlm.eval.glue.data import TASKS, tasks_of
from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions
from prismlm.eval.glue.study import run_glue, search, server_file, with_rate
from tests.helpers.glue_rows import save_glue_model, write_rows, write_toy


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {
        family: GlueModel(save_glue_model(place / family, family))
        for family in ("llama", "gpt2", "protot")
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data"))


@pytest.fixture
def options(data):
    return GlueOptions(data=data, learning_rate=5e-3, warmup=0.1)


@pytest.fixture
def quick(data):
    return GlueOptions(data=data, limit=16, dev_limit=8, learning_rate=5e-3, warmup=0.1, epochs=1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "protot"])
def test_a_task_that_can_be_learned_is_learned(models, options, tmp_path, family):
    both = family == "llama"
    seeds = [0, 1] if both else [0]
    found = run_glue(models[family], tmp_path, options, ["sst2"], seeds, from_scratch=both)
    (row,) = found["tasks"]
    assert row["constant"] == {"accuracy": 0.5}
    for arm in ("fine_tuned", "from_scratch")[: 1 + both]:
        assert row[arm]["seeds"] == seeds
        assert row[arm]["mean"]["accuracy"] > 0.9
    assert row["fine_tuned"]["low"] <= row["fine_tuned"]["mean"]["accuracy"]
    assert row["train"] == {"rows": 128, "where": "sst2_train_subset.parquet"}
    assert found == json.loads((tmp_path / "glue.json").read_text())
    for seed in seeds:
        lines = (tmp_path / "predictions" / str(seed) / "SST-2.tsv").read_text().splitlines()
        assert lines[0] == "index\tprediction"
        assert [line.split("\t")[0] for line in lines[1:]] == ["0", "1", "2", "3", "4"]
        right = [line.split("\t")[1] == "01"[row % 2] for row, line in enumerate(lines[1:])]
        assert sum(right) >= 4


def test_scores_are_fitted_and_hidden_sets_are_left_out(models, tmp_path):
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


def test_other_settings_and_another_model_are_refused(models, quick, tmp_path):
    run_glue(models["llama"], tmp_path, quick, ["sst2"], [0])
    other = GlueOptions(data=quick.data, learning_rate=1e-4, warmup=0.1)
    with pytest.raises(InputError, match=r"limit: 16 → None; warmup|learning_rate: 0.005 → 0.0001"):
        run_glue(models["llama"], tmp_path, other, ["sst2"], [0])
    with pytest.raises(InputError, match=r"runs with other settings \(model: .*--out"):
        run_glue(models["gpt2"], tmp_path, quick, ["sst2"], [0])
    kept = tmp_path / "runs" / "sst2-0.json"
    run = json.loads(kept.read_text())
    for damaged in ({"task": "sst2"}, run | {"measured": {"dev": {"gold": ["x"]}}}, [run]):
        kept.write_text(json.dumps(damaged))
        with pytest.raises(FormatError, match=r"sst2-0\.json"):
            run_glue(models["llama"], tmp_path, quick, ["sst2"], [0])


def test_a_search_is_kept_and_used(models, quick, tmp_path):
    rates = (1e-9, 1e-2)
    data, lm = write_toy(tmp_path / "data"), models["llama"]
    words = ("entailment", "neutral", "contradiction")
    mnli = [
        {"premise": "abc"[row % 3], "hypothesis": "x", "label": words[row % 3]} for row in range(48)
    ]
    for split in ("train", "dev"):
        write_rows(data, f"mnli_{split}_subset", mnli)
    options = GlueOptions(data=data, limit=48)
    assert with_rate(lm, tmp_path / "out", options)[1] == "the source's"
    found = search(lm, tmp_path / "out", options, rates=rates)
    assert found["learning_rate"] == 1e-2
    assert [(one["learning_rate"], one["warmup"]) for one in found["tried"]] == [
        (1e-9, 0.06), (1e-9, 0.1), (1e-2, 0.06), (1e-2, 0.1)
    ]  # fmt: skip
    means = [one["sst2"] + one["mnli"] for one in found["tried"]]
    assert found["warmup"] == found["tried"][means.index(max(means))]["warmup"]
    assert with_rate(lm, tmp_path / "out", options) == (
        replace(options, learning_rate=1e-2, warmup=found["warmup"]), "searched"
    )  # fmt: skip
    given, said = with_rate(lm, tmp_path / "out", replace(options, learning_rate=3e-4))
    assert (given.learning_rate, given.warmup, said) == (3e-4, found["warmup"], "given")
    # It is not used for another model.
    with pytest.raises(FormatError, match="of another version or damaged"):
        with_rate(models["gpt2"], tmp_path / "out", options)
    (damaged,) = (tmp_path / "out" / "search" / "runs").glob("sst2-0-0.01-0.1.json")
    damaged.write_text('{"task": "sst2"}')
    with pytest.raises(FormatError, match=r"0\.1\.json is not what a run writes"):
        search(lm, tmp_path / "out", options, rates=rates)


def test_the_server_s_files():
    by_name = {task.name: task for task in TASKS}
    assert server_file(by_name["rte"], [1, 0]) == (
        "index\tprediction\n0\tnot_entailment\n1\tentailment\n"
    )
    assert server_file(by_name["cola"], [1]) == "index\tprediction\n0\t1\n"
    assert server_file(by_name["mnli"], [1]) == "index\tprediction\n0\tneutral\n"
    assert server_file(by_name["stsb"], [3.14159]) == "index\tprediction\n0\t3.142\n"
    names = [
        split.title
        for task in tasks_of()
        for name, split in task.splits.items()
        if name.startswith("test")
    ]
    assert names == [
        "CoLA", "SST-2", "MRPC", "STS-B", "RTE", "WNLI", "QQP", "QNLI", "MNLI-m", "MNLI-mm"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", 0),
        ("dev_limit", 2),
        ("epochs", 0),
        ("batch_size", 0),
        ("learning_rate", 0.0),
        ("warmup", 1.5),
    ],
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name} is {value}"):
        GlueOptions(**{name: value})
