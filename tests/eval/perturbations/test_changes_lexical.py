import random

import pytest

from prismlm.eval.perturbations.changes import (
    WORDS_FILE,
    cased,
    morphology,
    spelling,
    synonym,
    words,
)


def all_of(perturb, sentence):
    """Return every sentence that a slice may make of one."""
    found = (perturb(sentence, random.Random(seed)) for seed in range(40))
    return {None if change is None else change.text for change in found}


@pytest.mark.parametrize(
    ("sentence", "texts"),
    [
        ("The movie was fine.", {"The film was fine."}),
        ("Perhaps the doctor knows.", {
            "Maybe the doctor knows.", "Possibly the doctor knows.", "Perhaps the physician knows.",
            "Maybe the physician knows.", "Possibly the physician knows.",
        }),
        # The article would be wrong.
        ("It was an error.", {None}),
        # Names are no words, nor are parts of others.
        ("We went to Rock Island by-error.", {None}),
        ("They began it.", {"They started it."}),
    ],
)  # fmt: skip
def test_synonyms(sentence, texts):
    assert all_of(synonym, sentence) == texts


def test_one_to_three_synonyms_are_put_in():
    sentence = "The movie was almost entirely shot by a kid from that shop."
    words = sentence.split()
    counts = {
        sum(a != b for a, b in zip(words, text.split(), strict=True))
        for text in all_of(synonym, sentence)
    }
    assert counts == {1, 3}


@pytest.mark.parametrize(
    ("sentence", "texts"),
    [
        ("I like this color.", {"I like this colour."}),
        ("I like this colour.", {"I like this color."}),
        ("Theaters organize it.", {"Theatres organize it.", "Theaters organise it."}),
        # What is spelled otherwise depends on the meaning, or belongs to a name.
        ("Check the tire story on the Labor Day program.", {None}),
    ],
)
def test_spelling(sentence, texts):
    assert all_of(spelling, sentence) == texts


@pytest.mark.parametrize(
    ("sentence", "texts"),
    [
        ("She lives in the city.", {"She lives in the cities.", "She lived in the city."}),
        ("They came with their children.", {
            "They came with their child.", "They come with their children.",
        }),
        ("The teachers say so.", {"The teachers said so."}),
        # The noun is a part of another, the verb is another's, or the time is said.
        ("Go to the city council.", {None}),
        ("What did they make?", {None}),
        ("Didn't you know?", {None}),
        ("He wanted it yesterday.", {None}),
        ("I hope he can.", {None}),
        ("You know, that is so.", {None}),
    ],
)  # fmt: skip
def test_morphology(sentence, texts):
    assert all_of(morphology, sentence) == texts


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
