"""Random command lines, calls and damaged files end in a right answer or in an error of ours."""

import json
import re

import pytest

from benchmarks.robustness.command_line import invoke
from benchmarks.robustness.damaged_files import Damage, copy_damaged
from benchmarks.robustness.fuzz import fuzz
from benchmarks.robustness.world import World, judged
from prismlm.errors import InputError


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("fuzz") / "world")


def _wrong(found, count):
    """Return the findings, and a word where all is refused, or nothing, which looks at nothing."""
    wrong = [f"{one.kind}: {one.example}" for one in found.findings]
    balanced = found.cases == count and found.right > count / 100 and found.errors > count / 4
    return wrong if balanced else [*wrong, f"looks at too little: {found}"]


# A few of them each time; the page of robustness has what came of 20,000.
@pytest.mark.parametrize(("part", "count"), [("command line", 200), ("api", 100), ("readers", 100)])
@pytest.mark.usefixtures("unchecked")
def test_random_inputs_end_in_an_answer_or_an_error_of_ours(world, part, count):
    assert _wrong(fuzz(part, world, count, 0), count) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", ["command line", "api", "readers"])
@pytest.mark.usefixtures("unchecked")
def test_twenty_thousand_random_inputs(world, part):
    assert _wrong(fuzz(part, world, 20_000, 1), 20_000) == []


def test_what_a_case_changes_is_noticed_and_put_back(world):
    notes, before = world.root / "notes.txt", (world.root / "notes.txt").read_bytes()
    notes.write_text("changed")
    (world.root / "left").write_text("behind")
    (world.root / "named.html").write_text("page")
    (world.root / ".named.html.lock").write_text("")
    assert world.changes(["named.html"]) == ["left", "notes.txt"]
    assert notes.read_bytes() == before
    assert not (world.root / "left").exists()
    assert world.changes() == []


def test_an_output_that_was_there_may_change_only_where_that_was_asked_for(world):
    for overwrite, wrong in ((False, ["rows.csv"]), (True, [])):
        (world.root / "rows.csv").write_text("new")
        assert world.changes(["rows.csv"], overwrite) == wrong


def test_how_a_case_ends():
    def refused():
        raise InputError("the text is empty: give at least one token.")

    def wordless():
        raise InputError("no")

    assert judged("x", lambda: None) == "right"
    assert judged("x", refused) == "error"
    assert judged("x", wordless).kind == "says too little: no"
    assert judged("x", lambda: "another answer").kind == "another answer"
    assert judged("x", lambda: {}["missing"]).kind == "KeyError"


def test_weights_that_are_not_what_was_written_are_found_with_verify(world, monkeypatch):
    monkeypatch.chdir(world.root)
    command = ["inspect", "index", "damaged", "--verify"]
    # All of so small a model is looked at when it is opened, so it is the note that is changed.
    copy_damaged(world.root / "model", world.root / "damaged", Damage("config.json", "flip", 1, 1))
    code, out, _ = invoke(command)
    assert (code, re.search(r"weights verified +2", out) is not None) == (0, True)
    Damage("model.safetensors", "flip", 0.8, 3).apply(world.root / "damaged" / "model.safetensors")
    assert invoke(command)[0] == 2
    assert world.changes(["damaged"]) == []
    copy_damaged(world.root / "model", world.root / "damaged", Damage("config.json", "flip", 1, 1))
    note = world.root / "damaged" / "prismlm.json"
    meta = json.loads(note.read_text())
    meta["files"]["model.safetensors"] = "0" * 32
    note.unlink()
    note.write_text(json.dumps(meta))
    code, _, errors = invoke(command)
    assert (code, "model.safetensors is damaged" in errors) == (2, True)
    assert world.changes(["damaged"]) == []
