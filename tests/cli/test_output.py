from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from prismlm.cli import label, progress, steer
from prismlm.cli.eval.robustness import print_clamping
from prismlm.cli.output import (
    console_for_reading,
    fit_ends,
    fit_name,
    plain,
    print_cost,
    print_rows,
    quality_rows,
)
from prismlm.cli.printing.tables import print_report, show
from prismlm.cost import Cost
from prismlm.explain.quality import HeadQuality
from prismlm.instruments.results import Report, Table


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        ("openstax/nursing", 16, "openstax/nursing"),
        ("public-domain (Gutenberg)", 13, "public…nberg)"),
        ("public-domain (Gutenberg)", 10, "publi…erg)"),
        ("日本語の文書番号", 9, "日本…番号"),
        ("ab", 1, "a…"),
    ],
)
def test_names_are_cut_in_the_middle(name, width, shown):
    assert fit_ends(name, width) == shown
    assert width < 2 or cell_len(shown) <= width


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        (
            "decision, right → of, made, taken (court)",
            48,
            "decision, right → of, made, taken (court)",
        ),
        ("decision, right → of, made, taken (court)", 33, "decision, right → of, made, taken"),
        ("decision, right → of, made, taken (court)", 17, "decision → of"),
        ("(proclamation, treaty) → “,”, and", 24, "(proclamation) → “,”"),
        ("the · a · their", 9, "the · a"),
        ("Liou-ville, Ha-usdorff", 12, "Liou-ville"),
        ("decision → of", 8, "deci…of"),
    ],
)
def test_names_of_prototypes_lose_words_before_letters(name, width, shown):
    assert fit_name(name, width) == shown
    assert cell_len(shown) <= width


def test_text_moves_nothing_on_a_terminal():
    assert plain("a\u202eb\u2066c\u061cd") == "a‹U+202E›b‹U+2066›c‹U+061C›d"
    assert plain("\x1b[31m\x07\r\n\t") == "�[31m�\n\t"
    # What joins the parts of one sign is kept.
    assert plain("🏳\ufe0f\u200d🌈") == "🏳\ufe0f\u200d🌈"


MARKED = "[/x] [x] :smile: [bold]it[/]"


def words_of_a_case_file():
    columns = {"context": "", "target": ""}
    rows = ({"context": MARKED, "target": "a"},)
    show(console_for_reading(), Table("", columns, rows))


def words_that_were_counted():
    show(console_for_reading(), Table("", {"a": ""}, ({"a": 1},), {"words": {MARKED: 3}}))


def the_title_of_a_table():
    show(console_for_reading(), Table(MARKED, {"a": ""}, ({"a": 1},)))


def the_reason_of_what_was_left_out():
    print_report(Report("m", {}, {}, {"loss": MARKED}))


def the_corpus_of_a_cost():
    cost = SimpleNamespace(
        corpus=MARKED, control=None, left=0, perplexity=2.0, edited=3.0, tokens=9, changed=0.5
    )
    steer._print_cost(console_for_reading(), cost, "")


def slices_of_pairs():
    part = {
        "name": MARKED, "clamped": None, "control": None, "gain": None, "of_equal_length": 0,
        "unaligned": 0, "below_floor": 0,
    }  # fmt: skip
    print_clamping({"name": "m", "routing": "mixers", "slices": [part]})


def categories_of_names():
    found = SimpleNamespace(
        named=1, prototypes=1, detection=None, fuzzing=None, scored=0, held_out=0,
        categories={MARKED: 1},
    )  # fmt: skip
    label._print(found)


def models_of_a_cost():
    print_cost(Cost(1.0, 1, 1, {}, (Cost(1.0, 1, 1, {}, name=MARKED),)), as_json=False)


def models_that_write():
    console = Console(width=120, force_terminal=True, color_system=None)
    with progress._bars(console) as bars:
        progress._Bar(bars, MARKED, 3, "texts").finish()


@pytest.mark.parametrize(
    "printed",
    [
        words_of_a_case_file,
        words_that_were_counted,
        the_title_of_a_table,
        the_reason_of_what_was_left_out,
        lambda: print_report(Report(MARKED, {}, {})),
        lambda: print_report(Report("m", {"corpus": MARKED}, {})),
        the_corpus_of_a_cost,
        slices_of_pairs,
        categories_of_names,
        models_of_a_cost,
        models_that_write,
        lambda: print_rows([(MARKED, "1")], ""),
    ],
)
def test_foreign_text_is_no_markup(printed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    printed()
    assert MARKED in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mean_state", "alone", "explained", "recovered", "share"),
    [
        (6.0, 4.2, 0.9, "90.0% of what the states say beyond their mean", "0.900"),
        (4.01, 3.95, 0.9, "600.0%, no figure of a trained model, where 0% to 100% can be", "0.900"),
        (4.0, 3.9, 0.9, "nothing to recover: the states say no more than their mean", "0.900"),
        (3.9, 4.1, 0.9, "nothing to recover: the states say no more than their mean", "0.900"),
        (
            *(6.0, 90.0, 25.84),
            "-4,200.0%, no figure of a trained model, where 0% to 100% can be",
            "25.840, no figure of a working head, where 0 to 1 can be",
        ),
    ],
)
def test_figures_that_no_working_head_has_are_called_so(
    mean_state, alone, explained, recovered, share
):
    rows = dict(quality_rows(HeadQuality(10, 4.0, alone, explained, 0.1, 0.8, 1, 9, mean_state)))
    assert (rows["recovered"], rows["explained share"]) == (recovered, share)
