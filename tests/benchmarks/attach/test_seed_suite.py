"""Two runs of the suite put together, and the plot of them."""

import re

import pytest

from benchmarks.attach import seed_suite
from benchmarks.attach.seed_suite_plot import draw
from prismlm.eval.accuracy import mean_figures, task_figures
from prismlm.files import read_json, write_json
from tests.benchmarks.scripts import run

RIGHT = {"a": [1] * 90 + [0] * 10, "b": [1] * 50 + [0] * 50}


def answers(task, correct):
    """Made-up answers to a hundred questions with two choices; the first is always right."""
    return {
        "task": task, "of": 500, "chosen": list(range(100)), "gold": [0] * 100,
        "choices": [2] * 100, "truncated": 0,
        "correct": {name: {"acc": of} for name, of in correct.items()},
    }  # fmt: skip


def write(directory, tasks):
    for task, correct in tasks.items():
        (directory / "tasks").mkdir(parents=True, exist_ok=True)
        write_json(directory / "tasks" / f"{task}.json", answers(task, correct))
    figures = [{"title": t.upper()} | task_figures(answers(t, c)) for t, c in tasks.items()]
    write_json(
        directory / "eval.json",
        {
            "model": "somewhere", "data": "elsewhere", "suite": "seed", "limit": 100, "seed": 0,
            "shots": 0, "predictors": list(tasks["a"]), "metric": "acc", "band_percent": 5.0,
            "tasks": figures, "mean": mean_figures(figures), "versions": {"lm_eval": "0"},
        },
    )  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    def parts(task):
        half = [1, 0] * 50
        return {"plain": RIGHT[task], "prototype_only": half, "residual_only": RIGHT[task]}

    write(tmp_path / "ours", {task: parts(task) for task in RIGHT})
    write(tmp_path / "base", {"a": {"plain": [1] * 80 + [0] * 20}, "b": {"plain": RIGHT["b"]}})
    return tmp_path


def made(runs, monkeypatch, *words):
    run(seed_suite, monkeypatch, runs / "ours", *words, "--out", runs / "out.json")
    return read_json(runs / "out.json")


def test_differences_are_of_the_same_questions(runs, monkeypatch):
    result = made(runs, monkeypatch, "--base", runs / "base")
    assert "somewhere" not in str(result)
    assert "elsewhere" not in str(result)
    tuned = result["differences"]["fine_tuning"]
    # Ten of a hundred questions gained: s² = (0.1 · 0.9) · 100 / 99.
    assert tuned["a"]["value"] == pytest.approx(0.1)
    assert tuned["a"]["stderr"] == pytest.approx((0.09 / 99) ** 0.5)
    assert tuned["b"] == {"value": 0.0, "stderr": 0.0}
    assert tuned["mean"]["stderr"] == pytest.approx((0.09 / 99) ** 0.5 / 2)
    assert result["differences"]["residual_less_prototypes"]["a"]["value"] == pytest.approx(0.4)


def test_other_questions_are_refused(runs, monkeypatch):
    path = runs / "base" / "tasks" / "b.json"
    write_json(path, read_json(path) | {"chosen": list(range(1, 101))})
    with pytest.raises(SystemExit, match="b: the two runs have other questions"):
        made(runs, monkeypatch, "--base", runs / "base")


def test_bars_and_band_stand_where_the_figures_are(runs, monkeypatch):
    drawn = draw(made(runs, monkeypatch)["ours"])
    # 260 pixels for 80 %, from 300 upwards: 50 % is at 137.5, its band of 5 % 16.25 high.
    assert re.search(r'<rect [^>]*y="137.5" [^>]*fill="#D55E00"', drawn)
    assert re.search(r'<rect [^>]*y="129.4" [^>]*height="16.[23]" fill="#8A8A8A"', drawn)
