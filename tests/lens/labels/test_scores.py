"""A name's score is the balanced accuracy of its words, by hand."""

import numpy as np
import pytest

from prismlm.lens.labels.contexts import sample_places
from prismlm.lens.labels.embedded import Label
from prismlm.lens.labels.write import _accuracy, bare, score_labels, words_of


def passages(*texts):
    return [frozenset(words_of(text)) for text in texts]


def test_signs_that_part_the_words_of_a_name_are_none_of_it():
    assert words_of(bare("“,”, and → “(”, ↵ (fur, -ic)")) == [
        ",", "and", "(", "↵", "fur", "-", "ic"
    ]  # fmt: skip
    assert words_of(bare("(team, force) → “).”, …")) == ["team", "force", ")", "."]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        # Both that fire have the word, and none of the others.
        ("cat", 1.0),
        # One of two that fire, and none of the others: the second is drawn from three that are
        # equal, of which one fires: (1 + 1/3) / 2 of those that fire, (2/3) / 2 of the others.
        ("ear", (2 / 3 + 1 - 1 / 3) / 2),
        # Only what does not fire.
        ("dog", 0.0),
        # Nowhere: every half is as good.
        ("nothing", 0.5),
    ],
)
def test_accuracy_by_hand(label, expected):
    seen = passages("a cat", "cat ear", "a dog", "the dog")
    rarity = dict.fromkeys(("cat", "ear", "dog", "a", "the"), 1.0)
    assert _accuracy(frozenset([label]), seen, rarity) == pytest.approx(expected)


def test_a_name_that_is_right_scores_above_the_others(lm, text):
    """Names with the very words that come next, one that is nowhere, and none at all."""
    places = sample_places(lm.lens.cells, lm.lens.num_prototypes, 60)
    chosen = np.flatnonzero(places.size >= 20)[:40]
    labels: list[Label | None] = [None] * len(places.size)
    for cell in chosen.tolist():
        tokens = text.next(places)[places.cell == cell]
        words = " ".join(text.vocabulary.texts[token] for token in set(tokens.tolist()))
        labels[cell] = Label(words, "", "", "", ())
    nowhere, unnamed = chosen[:2].tolist()
    labels[nowhere], labels[unnamed] = Label("qqq", "", "", "", ()), None
    scores = score_labels(labels, text, places)
    assert scores.fuzzing[nowhere] == scores.detection[nowhere] == 0.5
    assert np.isnan(scores.fuzzing[unnamed])
    scored = np.isfinite(scores.fuzzing)
    assert scored.sum() == len(chosen) - 1
    assert scores.fuzzing[scored].mean() > scores.shuffled_fuzzing[scored].mean() + 0.1
    again = score_labels(labels, text, places)
    np.testing.assert_array_equal(scores.detection, again.detection)
