"""The runs of the training script, and of the checks on what it trained."""

import json
import math

import pytest

from benchmarks.pages.uncertainty_feedback import CHECKS, answer
from benchmarks.uncertainty_feedback import checks as uncertainty_checks
from benchmarks.uncertainty_feedback import measure as uncertainty_feedback
from benchmarks.uncertainty_feedback import validation as uncertainty_validation
from benchmarks.uncertainty_feedback.measure import LITERAL, SWEEP, TRAIN, fed
from prismlm.training import build_recipe
from tests.benchmarks.scripts import run


def test_every_run_is_a_recipe_and_another_one():
    arms = TRAIN | SWEEP | LITERAL
    assert len({uncertainty_feedback.slug(name) for name in arms}) == len(arms)
    # Each part trains its own, but for the control that two have.
    assert len(arms) == sum(map(len, uncertainty_feedback.PARTS.values())) - 1
    recipes = [uncertainty_feedback.recipe_of(arm, "c", 0) for arm in arms.values()]
    assert len({json.dumps(recipe) for recipe in recipes}) == len(recipes)
    for recipe in recipes:
        built = build_recipe(recipe | {"out": "o"})
        assert built.uncertainty_feedback.enabled == ("uncertainty_feedback" in recipe)


@pytest.mark.slow
def test_runs_are_measured_and_checked(tiny_corpus, tmp_path, monkeypatch):
    small = {"preset": "llama-laptop", "hidden_size": 30, "num_hidden_layers": 1}
    monkeypatch.setattr(uncertainty_feedback, "MODEL", small)
    arms = {
        "no feedback": None,
        "two passes": fed(64),
        "shuffled": fed(64, rows=8, signal="shuffled"),
    }
    monkeypatch.setattr(uncertainty_feedback, "PARTS", {"train": arms, "levels": {}})
    for module in (uncertainty_feedback, uncertainty_validation):
        monkeypatch.setattr(module, "LENGTH", 32, raising=False)
    monkeypatch.setattr(uncertainty_validation, "WINDOWS", 24)
    monkeypatch.setattr(uncertainty_validation, "SAMPLE", 5)
    out, work = tmp_path / "results", tmp_path / "work"
    words = [tiny_corpus, "train", "--steps", 10, "--threads", 1, "--work", work, "--out", out]
    run(uncertainty_feedback, monkeypatch, *words)
    rows = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in out.iterdir()}
    assert sorted(rows) == ["no-feedback-0", "shuffled-0", "two-passes-0"]
    plain, two = (rows[f"{n}-0"] for n in ("no-feedback", "two-passes"))
    assert plain["perplexity"] == pytest.approx(math.exp(plain["ce"]))
    assert plain["parameters"] == two["parameters"]
    assert "table" not in plain
    assert two["table"]["parameters"] == 64 * 30
    counted = [row["validation"]["all"][k] for row in rows.values() for k in ("windows", "tokens")]
    assert counted[:2] == counted[2:4] == counted[4:]
    assert counted[0] == 24
    assert set(plain["validation"]["sample"]["losses"]) == {"no feedback"}
    found = two["validation"]["sample"]
    assert found["windows"] == 5
    assert found["differences"]["2 passes"]["mean"] == pytest.approx(
        found["losses"]["2 passes"] - found["losses"]["token by token"]
    )
    assert str(tmp_path) not in json.dumps(rows)

    checks = tmp_path / "checks"
    words = [work, "--seeds", 0, "--texts", 6, "--threads", 1, "--out", checks]
    run(uncertainty_checks, monkeypatch, *words)
    assert [path.name for path in checks.iterdir()] == ["two-passes-0.json"]
    checked = json.loads((checks / "two-passes-0.json").read_text(encoding="utf-8"))
    assert str(tmp_path) not in json.dumps(checked)
    assert all(answer(check, checked["report"]) for check in CHECKS)
