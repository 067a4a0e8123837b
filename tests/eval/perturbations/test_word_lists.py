import pytest

from prismlm.eval.perturbations.word_lists import WORDS_FILE, cased, words


def test_the_lists_are_small_and_hold_what_was_meant():
    assert WORDS_FILE.stat().st_size < 700_000
    lists = words()
    assert lists.spelling["color"] == "colour"
    assert lists.spelling["colour"] == "color"
    assert lists.contractions["don't"] == "do not"
    assert lists.plurals["child"] == "children"
    assert ["say", "says", "said"] in lists.verbs
    assert "film" in lists.synonyms["movie"]
    assert all(
        word not in others and abs(len(word) - len(other)) <= 3
        for word, others in lists.synonyms.items()
        for other in others
    )


@pytest.mark.parametrize(
    ("word", "like", "expected"), [("an", "The", "An"), ("tv", "USA", "TV"), ("a", "I", "A")]
)
def test_capitals_are_kept(word, like, expected):
    assert cased(word, like) == expected
