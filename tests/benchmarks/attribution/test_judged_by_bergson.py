"""What the other tool is told to do, and how its answer is read; the tool itself is not run."""

import json
from pathlib import Path

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
                out.mkdir(parents=True)
                (out / "summary.csv").write_text("query,spearman_corr\n0,0.5\n1,-0.1\n")

    monkeypatch.setattr(judged_by_bergson.subprocess, "run", run)
    return Judge(tmp_path), told


def test_lds_is_the_mean_over_predictions_on_the_models_of_the_bank(judge):
    judge, told = judge
    assert judge.datamodeling("ours") == pytest.approx(0.2)
    step = told[0]["validate"]
    assert step["method"] == {"kind": "lds", "subsets": "bank", "paths": [str(judge.bank)]}
    assert step["scores"].endswith("ours/scores")
    assert step["query"]["aggregation"] == "none"


def test_a_method_of_its_own_is_run_once_and_timed(judge):
    judge, told = judge
    for name in OWN:
        (judge.work / name).mkdir()
        first, again = judge.score(name), judge.score(name)
        assert first == again
        assert first["seconds"] >= 0
    assert [next(iter(step)) for step in told] == ["ekfac", "trackstar", "build", "score"]


def test_scores_of_its_own_methods_come_to_lie_where_they_are_judged(tmp_path):
    for name in OWN:
        last = own_steps(name, tmp_path, {"model": "m"}, {"dataset": "q"})[-1]
        index = next(iter(last.values()))["index_cfg"]
        assert index["model"] == "m"
        assert index["run_path"] in (str(tmp_path), str(tmp_path / "scores"))
