import pytest
from rich.cells import cell_len

from prismlm.cli.format import points
from prismlm.cli.output import fit_ends, fit_name, plain, table_of


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


def test_points_are_no_percents():
    assert points(0.0123) == "+1.2 points"
    assert points(-0.5) == "-50.0 points"


def test_a_table_knows_which_columns_are_numbers():
    table = table_of("name", "*share", widths=[7])
    assert [(c.header, c.justify, c.width) for c in table.columns] == [
        ("name", "left", 7),
        ("share", "right", None),
    ]
