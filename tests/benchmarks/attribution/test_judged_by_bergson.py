"""What the other tool is told to do, and how its answer is read; the tool itself is not run."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.attribution import judged_by_bergson
from benchmarks.attribution.judged_by_bergson import OWN, Judge, own_steps


@pytest.fixture
def judge(tmp_path, monkeypatch):
    told = []

    def run(command, **_):
        steps = json.loads(Path(command[-1]).read_text())["steps"]
        told.extend(steps)
        for step in steps:
            if "validate" in step:
                out = Path(step["validate"]["run_path"])
                out.mkdir(parents=True, exist_ok=True)
                (out / "summary.csv").write_text("query,spearman_corr\n0,0.5\n1,-0.1\n")
                (out / "filter_summary.csv").write_text(
                    "query,filter_change,random_mean\n0,0.5,0.1\n1,0.3,0.2\n2,0.1,0.1\n3,0.2,0.2\n"
                )

    monkeypatch.setattr(judged_by_bergson.subprocess, "run", run)
    (tmp_path / "queries.jsonl").write_text("first\nsecond\nthird\nfourth\n")
    (tmp_path / "subsets.json").write_text("[[0], [1], [2]]")
    (tmp_path / "outputs").mkdir()
    for model in range(2):
        (tmp_path / "outputs" / f"{model}.npy").touch()
    return Judge(tmp_path), told


def test_lds_is_asked_of_every_prediction_on_the_models_of_the_bank(judge):
    judge, told = judge
    assert judge.datamodeling("ours").tolist() == [0.5, -0.1]
    step = told[0]["validate"]
    # Of three models that are planned, two are there.
    there = Path(step["method"]["paths"][0])
    assert json.loads((there / "subsets.json").read_text()) == [[0], [1]]
    assert (there / "retrained").is_symlink()
    assert step["scores"].endswith("ours/scores")
    assert step["query"]["aggregation"] == "none"


def test_qld_of_every_method_is_one_run_beside_the_same_random_removals(judge, monkeypatch):
    judge, told = judge
    handed = []
    monkeypatch.setattr(judge, "_untrained", lambda: None)
    monkeypatch.setattr(judge, "_side_by_side", lambda *given: handed.append(given))
    rise = judge.removal(["ours", "theirs"], range(1, 3))
    assert {name: np.round(values, 9).tolist() for name, values in rise.items()} == {
        "ours": [0.4, 0.1],
        "theirs": [0.0, 0.0],
    }
    name = "removed 1 to 3"
    assert handed == [(name, ["ours", "theirs"], range(1, 3))]
    assert (judge.work / f"{name}.jsonl").read_text().split() == ["second", "third"] * 2
    step = told[0]["validate"]
    assert step["query"]["dataset"].endswith(f"{name}.jsonl")
    assert step["scores"].endswith(f"{name}/scores")
    assert step["model"].endswith("untrained")
    assert step["baseline_model"].endswith("base")


def test_qld_goes_on_where_it_was_stopped(judge, monkeypatch):
    judge, told = judge
    monkeypatch.setattr(judge, "_untrained", lambda: None)
    monkeypatch.setattr(judge, "_side_by_side", lambda *_: None)
    monkeypatch.setattr(judged_by_bergson, "AT_ONCE", 2)
    judge.removal(["ours", "theirs"], range(2))
    rise = judge.removal(["ours", "theirs"], range(4))
    assert np.round(rise["ours"], 9).tolist() == [0.4, 0.1, 0.4, 0.1]
    assert len(told) == 2
    # Other methods are another question.
    judge.removal(["theirs", "ours"], range(2))
    assert len(told) == 3


def test_a_method_of_its_own_is_run_once_and_timed(judge):
    judge, told = judge
    for name in OWN:
        (judge.work / name).mkdir()
        first, again = judge.score(name), judge.score(name)
        assert first == again
        assert first["seconds"]["once"] == 0
        assert first["seconds"]["a prediction"] > 0
    assert [next(iter(step)) for step in told] == ["ekfac", "trackstar", "build", "score"]


def test_what_is_ready_before_the_predictions_is_timed_apart(judge, monkeypatch):
    judge, _ = judge

    def run(*_):
        moments = judge.work / "Bergson EK-FAC" / "hessian"
        moments.mkdir(parents=True)
        time.sleep(0.05)
        (moments / "shard").touch()

    monkeypatch.setattr(judged_by_bergson, "run", run)
    assert 0.03 < judge.score("Bergson EK-FAC")["seconds"]["once"] < 5


def test_scores_of_its_own_methods_come_to_lie_where_they_are_judged(tmp_path):
    for name in OWN:
        last = own_steps(name, tmp_path, {"model": "m"}, {"dataset": "q"})[-1]
        index = next(iter(last.values()))["index_cfg"]
        assert index["model"] == "m"
        assert index["run_path"] in (str(tmp_path), str(tmp_path / "scores"))
