import io
import json

import pytest
from rich.console import Console

from prismlm.cli import output
from prismlm.cost import Cost
from prismlm.probes.results import Report

MARKED = "[/x] [x] :smile: [bold]it[/]"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (output.format_count(9999), "9,999"),
        (output.format_count(12_345), "12.3 k"),
        (output.format_count(999_600), "1.00 M"),
        (output.format_bytes(0), "0 B"),
        (output.format_bytes(1500), "1.50 kB"),
        (output.format_duration(59.6), "1 min 0 s"),
        (output.format_duration(3661), "1 h 1 min"),
        # Names are cut in the middle.
        (output.shorten("public-domain", 16), "public-domain"),
        (output.shorten("public-domain", 9), "publ…main"),
    ],
)
def test_numbers_and_names_as_people_read_them(shown, text):
    assert shown == text


def test_no_blank_is_printed_past_the_last_column():
    console = Console(file=io.StringIO(), width=10)
    writer = output.Writer(console)
    for character in "three four \n  five":
        writer.write(character)
    writer.write("", end=True)
    assert console.file.getvalue() == "three four\n  five\n"


def test_text_moves_nothing_on_a_terminal():
    assert output.sanitize("a\u202eb\u2066c\u061cd") == "a‹U+202E›b‹U+2066›c‹U+061C›d"
    assert output.sanitize("\x1b[31m\x07\r\n\t") == "�[31m�\n\t"
    # What joins the parts of one sign is kept.
    assert output.sanitize("🏳\ufe0f\u200d🌈") == "🏳\ufe0f\u200d🌈"


@pytest.mark.parametrize(
    "part",
    [
        output.table("", "target", [{"target": MARKED}], words={MARKED: 3}),
        Report("m", {"corpus": MARKED}, {}, {"loss": MARKED}),
        {"categories": {MARKED: 1}},
        MARKED,
    ],
)
def test_foreign_text_is_no_markup(part, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    output.say(part)
    assert MARKED in capsys.readouterr().out


def test_parts_are_made_as_they_are_printed_and_never_for_json(capsys):
    def parts():
        yield "one"
        assert capsys.readouterr().out == "one\n"
        yield {"two": 2}
        assert capsys.readouterr().out.split() == ["two", "2"]

    def unneeded():
        pytest.fail("was asked for")
        yield

    output.say(parts())
    output.show({"one": 1}, True, unneeded())
    assert json.loads(capsys.readouterr().out) == {"one": 1}


def test_a_cost_is_figures_then_notes(capsys):
    cost = Cost(61.0, 1500, None, {"tokens": 12_345}, "It is a guess.", ("The disk.",))
    output.show_cost(cost, False)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["tokens", "12.3", "k"],
        ["seconds", "1", "min", "1", "s"],
        ["memory", "bytes", "1.50", "kB"],
        ["disk", "bytes", "none"],
        ["Not", "known:", "The", "disk."],
        ["It", "is", "a", "guess."],
        ["Nothing", "was", "written."],
    ]


def test_figures_of_figures_have_a_row_for_each(capsys):
    output.show({"windows read, share": 1}, False)
    assert capsys.readouterr().out.split() == ["windows", "read,", "share", "100.0%"]
    support = {"a": {"strong": 3}, "b": {"strong": 0}}
    output.show({"held_out": {"documents": 9}, "support": support}, False)
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    rows = [[word.strip() for word in row] for row in rows]
    assert ["held", "out", "documents 9"] in rows
    assert ["support", "a", "strong 3"] in rows
    assert ["support", "b", "strong 0"] in rows


def test_a_prototype_has_its_number_and_a_count_is_short(capsys):
    row = {"prototype": 12345, "position": 67890, "contexts": 12345}
    output.show({"pairs": [row] * 21, "empty": []}, False)
    shown = capsys.readouterr().out
    assert "pairs, 20 of 21: --json has all" in shown
    assert shown.splitlines()[-2].split() == ["12345", "67890", "12.3", "k"]
