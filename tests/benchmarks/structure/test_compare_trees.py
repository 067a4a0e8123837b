"""A comparison of two trees finds what changed, and nothing else."""

import json
import shlex
from dataclasses import asdict, replace

import pytest

from benchmarks.structure.compare_trees import ALLOWED, RENAMES, main
from benchmarks.structure.differences import Comparison, differing, sorted_header
from benchmarks.structure.renames import Renames
from benchmarks.structure.scenario import COMMANDS, RECIPES, steps
from benchmarks.structure.trees import Said, read_outputs

INDEX = "index protot --corpus corpus --lens texts --contexts 8"
DRY_RUN = "audit demo/model audited.jsonl --dry-run --json"
EXPLAIN = "explain demo/model text --json"
REFUSED = "train gpt2.yaml --set unknown=1"
HELP = "inspect --help"
STDOUT = {
    INDEX: "tokens  39.4 k\ntime       1 s\nprotot/lens/texts\n",
    DRY_RUN: '{\n  "texts": 6,\n  "seconds": 0.19,\n  "memory_bytes": 500\n}\n',
    EXPLAIN: '{"evidence": 0.25, "seconds": 3}\n',
    REFUSED: "",
    HELP: "│ heads        Show how far each head looks and    │\n"
    "│              what at.                            │\n"
    "│ uncertainty  Show whether a model uses the signal │\n",
}
HISTORY = '{"loss": 7.5, "tokens_per_second": 99.5, "step": 2}\n'


def safetensors(payload, **notes):
    tensor = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    header = json.dumps({"__metadata__": notes, "a": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + payload


def write_outputs(folder):
    """What a tree might have left; returns the folder."""
    work = folder / "work"
    files = {
        "protot/model.safetensors": safetensors(b"weights", format="pt", levels="2"),
        "protot/routing.csv": b"step,layer\n4,0\n",
        "protot/training.jsonl": HISTORY.encode(),
        "protot/lens/texts/meta.json": json.dumps({"path": str(work), "prismlm": "1"}).encode(),
        "gpt2.yaml": b"out: gpt2\nuncertainty:\n  enabled: true\n",
        "audit.parquet": b"PAR1\x00\xff",
    }
    for name, data in files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    said = [Said(line.split()[0], line, 0, text, "", 1.0) for line, text in STDOUT.items()]
    said[3] = replace(said[3], exit_code=2, error="error: no 'unknown'. Known: steps, uncertainty.")
    tree = {"commit": folder.name, "paths": [str(work)], "seconds": 1.0, "torch": "2"}
    nothing = {"commands": {}, "recipe_keys": {}}
    (folder / "steps.json").write_text(json.dumps([asdict(one) for one in said]))
    (folder / "tree.json").write_text(json.dumps(tree | {"renames": nothing}))
    return folder


@pytest.fixture
def folders(tmp_path):
    return write_outputs(tmp_path / "one"), write_outputs(tmp_path / "other")


def compared(folders):
    """What differs, by item."""
    groups = Comparison(*map(read_outputs, folders), RENAMES, ALLOWED).groups()
    found = {one.item: one.lines for group in groups for one in group.differences}
    assert len(found) == differing(groups)
    return found


def say(folder, line, **changes):
    """Change what a command said."""
    path = folder / "steps.json"
    said = [one | changes if one["line"] == line else one for one in json.loads(path.read_text())]
    path.write_text(json.dumps(said))


def test_the_same_outputs_are_equal(folders):
    assert compared(folders) == {}


def test_a_changed_byte_of_a_file_is_found(folders):
    work = folders[1] / "work"
    (work / "audit.parquet").write_bytes(b"PAR1\x01\xff")
    weights = work / "protot" / "model.safetensors"
    weights.write_bytes(safetensors(b"weightz", format="pt", levels="2"))
    found = compared(folders)
    assert found.keys() == {"audit.parquet", "protot/model.safetensors"}
    assert found["audit.parquet"] == ["6 and 6 bytes, the first difference at 4"]


def test_notes_of_safetensors_may_have_another_order_and_no_other_value(folders):
    weights = folders[1] / "work" / "protot" / "model.safetensors"
    weights.write_bytes(safetensors(b"weights", levels="2", format="pt"))
    assert compared(folders) == {}
    weights.write_bytes(safetensors(b"weights", levels="3", format="pt"))
    assert compared(folders).keys() == {"protot/model.safetensors"}
    assert sorted_header(weights.read_bytes()).endswith(b"weights")


def test_a_changed_digit_of_stdout_is_found(folders):
    say(folders[1], EXPLAIN, stdout=STDOUT[EXPLAIN].replace("0.25", "0.26"))
    (lines,) = compared(folders).values()
    assert lines == ['1- {"evidence": 0.25, "seconds": 3}', '1+ {"evidence": 0.26, "seconds": 3}']


def test_exit_codes_and_messages_of_failures_are_compared(folders):
    say(folders[1], EXPLAIN, exit_code=1)
    say(folders[1], REFUSED, error="error: no 'unknown'. Known: steps.")
    found = compared(folders)
    assert found[EXPLAIN] == ["1- 0", "1+ 1"]
    assert found[REFUSED][1] == "1+ error: no 'unknown'. Known: steps."


def test_what_is_missing_is_found(folders):
    (folders[1] / "work" / "audit.parquet").unlink()
    (folders[1] / "work" / "new.json").write_text("{}")
    path = folders[0] / "steps.json"
    path.write_text(json.dumps(json.loads(path.read_text())[1:]))
    assert compared(folders) == {
        "audit.parquet": ["not there AFTER"],
        "new.json": ["not there BEFORE"],
        INDEX: ["not run BEFORE"],
    }


def test_a_duration_is_left_out_where_the_table_says_so_and_nowhere_else(folders):
    say(folders[1], INDEX, stdout=STDOUT[INDEX].replace("   1 s", "12.5 s"))
    faster = STDOUT[DRY_RUN].replace("0.19", "1.2e-05").replace("500", "501")
    say(folders[1], DRY_RUN, stdout=faster)
    history = folders[1] / "work" / "protot" / "training.jsonl"
    history.write_text(HISTORY.replace("99.5", "1.5e+03"))
    assert compared(folders) == {}
    history.write_text(HISTORY.replace("7.5", "7.6"))
    say(folders[1], EXPLAIN, stdout=STDOUT[EXPLAIN].replace("3", "4"))
    assert compared(folders).keys() == {"protot/training.jsonl", EXPLAIN}


def test_declared_renames_are_no_difference(folders):
    work = folders[1] / "work"
    (work / "protot" / "routing.csv").rename(work / "protot" / "channels.csv")
    (work / "gpt2.yaml").write_text("out: gpt2\nuncertainty_feedback:\n  enabled: true\n")
    say(folders[1], REFUSED, error="error: no 'unknown'. Known: steps, uncertainty_feedback.")
    wider = (
        "│ heads                 Show how far each head     │\n"
        "│                       looks and what at.         │\n"
        "│ uncertainty-feedback  Show whether a model uses  │\n"
        "│                       the signal                 │\n"
    )
    say(folders[1], HELP, stdout=wider)
    assert compared(folders) == {}
    say(folders[1], HELP, stdout=wider.replace("signal", "signals"))
    (work / "protot" / "channels.csv").write_text("step,layer\n4,1\n")
    assert compared(folders).keys() == {HELP, "protot/routing.csv"}


def test_a_page_without_a_rename_has_to_have_the_same_layout(folders):
    say(folders[1], HELP, stdout=STDOUT[HELP].replace("Show", " Show"))
    assert compared(folders).keys() == {HELP}


def test_a_tree_is_asked_in_its_own_words():
    pages = {"inspect": "│ uncertainty-feedback │"}
    renamed = RENAMES.had_by(pages.__getitem__, "Known: steps, uncertainty_feedback.")
    assert (renamed.commands, renamed.recipe_keys) == (RENAMES.commands, RENAMES.recipe_keys)
    before = ["inspect", "uncertainty", "model", "--set", "uncertainty.passes=1"]
    after = ["inspect", "uncertainty-feedback", "model", "--set", "uncertainty_feedback.passes=1"]
    assert renamed.in_arguments(before) == after
    assert renamed.in_recipe("uncertainty:\n  uncertainty: 1\n") == (
        "uncertainty_feedback:\n  uncertainty: 1\n"
    )
    same = RENAMES.had_by(lambda group: "│ uncertainty │", "Known: steps, uncertainty.")
    assert same == Renames({}, {}, {}, RENAMES.files, RENAMES.hidden)
    assert same.in_arguments(before) == before


def test_the_scenario_runs_every_command_whose_help_it_shows():
    found = steps(list)
    lines = [step.line for step in found]
    assert len(set(lines)) == len(lines)
    for line in COMMANDS["help"].split("\n"):
        words = shlex.split(line)[:-1]
        if words not in ([], ["corpus"], ["inspect"]):
            assert any(
                step.arguments[: len(words)] == words and step.group != "help" for step in found
            ), words
    for name in RECIPES:
        assert any(step.arguments[:2] == ["train", name] for step in found)


@pytest.mark.parametrize("changed", [False, True])
def test_it_exits_with_1_and_writes_what_differs(folders, tmp_path, monkeypatch, capsys, changed):
    if changed:
        say(folders[1], EXPLAIN, stdout="{}\n")
    out = tmp_path / "structure.json"
    monkeypatch.setattr("sys.argv", ["compare_trees", *map(str, folders), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == int(changed)
    printed = capsys.readouterr().out
    assert f"{int(changed)} of 17 items differ" in printed
    value = json.loads(out.read_text(encoding="utf-8"))
    assert value["equal"] is not changed
    assert (value["before"]["commit"], value["after"]["commit"]) == ("one", "other")
    assert [one["item"] for one in value["differences"]] == [EXPLAIN] * changed
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


def test_keys_follow_their_new_names_and_keep_their_values(folders):
    texts = '{\n"hidden_size": 48,\n"routing_temperature": 1.0\n}', '{\n"gate_temperature": 1.0,\n'
    for folder, text in zip(folders, (texts[0], texts[1] + '"hidden_size": 48\n}'), strict=True):
        (folder / "work" / "config.json").write_text(text)
    assert compared(folders) == {}
    (folders[1] / "work" / "config.json").write_text(texts[1] + '"hidden_size": 49\n}')
    assert compared(folders).keys() == {"config.json"}


def test_only_the_hidden_option_may_be_missing_from_a_page():
    page = "│ --category  NAME  Edit these.  │\n│ --document  ID    Edit those.  │\n"
    without = RENAMES.without_hidden("steer --help", page)
    assert without == "│ --document  ID    Edit those.  │\n"
    assert RENAMES.without_hidden("audit --help", page) == page
