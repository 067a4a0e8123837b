import random

import pytest

from prismlm.eval.perturbations.changes import (
    abbreviation,
    contraction,
    neighbours,
    punctuation,
    typo,
    words,
)
from tests.eval.perturbations.test_changes_lexical import all_of


@pytest.mark.parametrize(
    ("letter", "others"), [("q", "wa"), ("g", "tyfhvb"), ("p", "ol"), ("m", "jkn"), ("s", "weadzx")]
)
def test_keys_that_touch(letter, others):
    assert sorted(neighbours()[letter]) == sorted(others)
    assert all(letter in neighbours()[other] for other in others)


def test_a_typo_is_one_neighbour_inside_one_word():
    sentence = "The formal garden was form and it's Never well-kept."
    for seed in range(200):
        change = typo(sentence, random.Random(seed))
        # What came out was a word, such as firm.
        if change is None:
            continue
        text = change.text
        ((place, new),) = [(i, c) for i, c in enumerate(text) if c != sentence[i]]
        assert new in neighbours()[sentence[place]]
        slipped = text[: place + 1].split()[-1] + text[place + 1 :].split(" ")[0]
        assert slipped not in words().common
        # Neither the first nor the last letter, and no word with a sign or a capital.
        assert sentence[place - 1].isalpha()
        assert sentence[place + 1].isalpha()
        assert sentence[:place].count(" ") in (1, 2, 4)
    assert typo("It is as he said, Mother.", random.Random(0)).text[:8] == "It is as"
    assert typo("It is so, Mother.", random.Random(0)) is None


@pytest.mark.parametrize(
    ("sentence", "texts"),
    [
        ("I do not know.", {"I don't know."}),
        ("Don't worry about it.", {"Do not worry about it."}),
        ("It's not here.", {"It is not here."}),
        ("I cannot go.", {"I can't go."}),
        ("I have seen it.", {"I've seen it."}),
        ("Let us go home.", {"Let's go home."}),
        ("There is a dog.", {"There's a dog."}),
        # It has been; he had or would; an end that is stressed; a question; a noun before it.
        ("It's been long.", {None}),
        ("He'd go.", {None}),
        ("I know what it is.", {None}),
        ("I have a dog.", {None}),
        ("Don't you know?", {None}),
        ("Ask how he is doing.", {None}),
        ("The food there is good.", {None}),
    ],
)
def test_contractions(sentence, texts):
    assert all_of(contraction, sentence) == texts


def test_punctuation_leaves_the_words_in_order():
    assert all_of(punctuation, "However, we came and saw.") == {
        "However, we came and saw",
        "However we came and saw.",
        "however, we came and saw.",
        "However, we came, and saw.",
        "However, we Came and saw.",
    }
    assert all_of(punctuation, "He is in.") == {"He is in", "he is in."}


@pytest.mark.parametrize(
    ("sentence", "texts"),
    [
        ("Doctor Smith arrived.", {"Dr. Smith arrived."}),
        ("Dr. Smith arrived.", {"Doctor Smith arrived."}),
        ("A doctor arrived.", {None}),
        ("General Motors met Attorney General Smith.", {None}),
        ("He lives in the United States.", {"He lives in the U.S.", "He lives in the US."}),
        ("It fell in the U.S.", {"It fell in the United States."}),
        ("They left US 2 there.", {None}),
        ("It rose 5 percent in January 2004.", {
            "It rose 5% in January 2004.", "It rose 5 percent in Jan. 2004.",
        }),
        ("He came on Monday.", {"He came on Mon."}),
        ("The Monday Club met Jan.", {None}),
        ("It is 5 km long.", {"It is 5 kilometers long."}),
        ("Television is dull.", {None}),
        ("TV is dull.", {"Television is dull."}),
        ("An advertisement was shown.", {"An ad was shown."}),
        ("See Volume 2 of it.", {"See Vol. 2 of it."}),
        ("Acme Corporation grew.", {"Acme Corp. grew."}),
    ],
)  # fmt: skip
def test_abbreviations(sentence, texts):
    assert all_of(abbreviation, sentence) == texts
