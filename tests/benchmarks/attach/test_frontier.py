"""Heads fitted to stored states by the script."""

import sys

import pytest

from benchmarks.attach import frontier
from prismlm.files import read_json

HEAD = ("--prototypes", "64", "--per-token", "4")
SMALL = {"WINDOW": 64, "BATCH": 64, "RATE": 0.05, "POINTS": 2, "MEASURED": 300}


@pytest.fixture(scope="module")
def results(tiny_model, short_corpus, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")

    def run(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            words = ["frontier", *arguments, "--work", work, "--out", work / "out"]
            patch.setattr(sys, "argv", [str(word) for word in words])
            for name, value in SMALL.items():
                patch.setattr(frontier, name, value)
            frontier.main()

    run("states", tiny_model, short_corpus, "--gb", 0.02)
    run("control", tiny_model, *HEAD)
    run("fit", tiny_model, *HEAD, "--steps", 120)
    return [read_json(path) for path in sorted((work / "out").glob("*.json"))]


def test_a_fitted_head_does_better_than_random_states(results):
    control, fit = results
    assert (control["part"], fit["part"]) == ("control", "fit")
    assert [point["step"] for point in fit["points"]] == [0, 100, 120]
    last = fit["points"][-1]
    assert last["ce"] == pytest.approx(control["points"][-1]["ce"])
    assert last["recovered"] > max(
        fit["points"][0]["recovered"], control["points"][-1]["recovered"]
    )
