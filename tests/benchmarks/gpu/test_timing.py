"""The timings of a GPU, at tiny sizes on a CPU."""

from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.gpu import timing
from benchmarks.pages.gpu import GOALS, MIXER
from prismlm.files import read_json, write_json
from tests.benchmarks.scripts import run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    out = tmp_path_factory.mktemp("timed")
    with pytest.MonkeyPatch.context() as patch:
        for part in timing.PARTS:
            run(timing, patch, out, part, "--tiny")
    return read_json(out / "gpu.json")["parts"]


def test_every_part_is_timed(timed):
    assert list(timed) == list(timing.PARTS)
    figures = {name: part["figures"] for name, part in timed.items()}
    for name in ("head, gpt2-small", "head, gpt2-xl"):
        assert figures[name]["ratio"]["ratio"] > 0
        # The optimizer of a CPU looks at the steps of two more parameters; the head at nothing.
        assert figures[name]["waits"]["with"] - figures[name]["waits"]["without"] == 2
    assert set(figures["feedback"]["timed"]) == {"decode", "prefill", "step"}
    assert set(figures["mixer"]["parts"]) == {"mixer", "step"}
    assert figures["training"]["waits_of_a_step"] >= 0
    assert figures["index"]["states"]["train"] > figures["index"]["states"]["heldout"] > 0


def test_the_page_shows_what_was_timed_and_what_waits(timed, tmp_path):
    waits = "| not timed |"
    for path in (ROOT / "docs" / "results").iterdir():
        if path.name != "gpu.json":
            (tmp_path / path.name).symlink_to(path)
    assert render.page("gpu", tmp_path).count(waits) == len(GOALS)
    write_json(tmp_path / "gpu.json", {"parts": timed})
    page = render.page("gpu", tmp_path)
    # The mixer at tiny sizes has other lengths and precision.
    assert page.count(waits) == len(MIXER)
    assert "| waits: with | " in page
    assert "Failed" not in page


def test_a_part_that_fails_is_noted(tmp_path, monkeypatch):
    run(timing, monkeypatch, tmp_path, "mixer", "--failed", "no GPU")
    assert read_json(tmp_path / "gpu.json")["parts"]["mixer"]["failed"] == "no GPU"
