"""Heads fitted to stored states by the script, and the page of what they are worth."""

import sys

import pytest

from benchmarks.attach import frontier
from benchmarks.attach.render import render, shipped
from prismlm.files import read_json
from tests.helpers.tiny import build_small_corpus

HEAD = ("--prototypes", "64", "--per-token", "4", "--batch", "64", "--heldout", "300")


@pytest.fixture(scope="module")
def results(tiny_model, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    corpus = build_small_corpus(tiny_model, work)

    def run(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            words = ["frontier", *arguments, "--work", work, "--out", work / "out"]
            patch.setattr(sys, "argv", [str(word) for word in words])
            frontier.main()

    run("states", tiny_model, corpus, "--window", 64, "--gb", 0.02)
    run("control", tiny_model, *HEAD)
    run("fit", tiny_model, *HEAD, "--steps", 120, "--points", 2, "--rate", 0.05)
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


def test_the_page_says_what_misses(results):
    control, fit = results
    page = render(results, shipped())
    last = fit["points"][-1]
    worse = last["prototype_only_ce"] / last["ce"] - 1
    assert f"**{worse:+.1%}** above the model's, goal at most +15%: met" in page
    assert "control: random states" in page
    assert "the cross-entropy tells the fitted head from them" in page
    share = control["points"][-1]["explained_share"]
    assert f"an explained share of {share:.3f}" in page
    quality = shipped()["quality"]
    over = quality["prototype_only_ce"] / quality["ce"] - 1
    assert (
        f"| CE of the prototypes alone | {quality['prototype_only_ce']:.3f}, {over:+.1%} |" in page
    )
    last["prototype_only_ce"] = 2 * last["ce"]
    assert "**+100.0%** above the model's, goal at most +15%: **missed**" in render(
        [control, fit], shipped()
    )
