"""Names say what was counted."""

import re

import numpy as np
import pytest

from prismlm.lens.labels.contexts import CATEGORIES, sample_places, subject_words
from prismlm.lens.labels.embedded import NAME_LENGTH, Namer
from prismlm.models.sidecar import weight_of


@pytest.fixture(scope="module")
def places(lm):
    return sample_places(lm.lens.cells, lm.lens.num_prototypes, 100)


@pytest.fixture(scope="module")
def labels(lm, text, places):
    subjects = subject_words(weight_of(lm.model), text)
    raised = lm.lens.prototypes["top_tokens"].to_pylist()
    return Namer(text, places, lm.lens.cells, subjects, raised).labels()


def test_every_cell_with_a_place_is_named(places, labels):
    occupied = np.bincount(places.cell, minlength=len(labels)) > 0
    assert [label is not None for label in labels] == occupied.tolist()
    for label in filter(None, labels):
        assert " → " in label.name or "-" in label.name
        assert len(label.name) <= NAME_LENGTH
        # Whole words, and brackets that are closed.
        assert label.name.count("(") == label.name.count(")") or "“" in label.name
        assert label.category in CATEGORIES


def test_shares_are_those_of_the_places(text, places, labels):
    words, compared = text.words, 0
    following = text.word[text.next(places)]
    for cell, label in enumerate(labels):
        rows = places.cell == cell
        if label is None or rows.sum() < 8:
            continue
        listed = re.search(r"Comes next: (.*?)\.(?= |$)", label.description)[1]
        for word, share in re.findall(r"(?:^|, )([a-z]{3,}) (\d+)%", listed):
            if word in words:
                expected = (following[rows] == words.index(word)).mean()
                assert int(share) == round(100 * float(expected))
                compared += 1
    assert compared > 20


def test_words_are_ordered_by_how_much_they_tell(text, places, labels):
    """p ln(p / base), by hand for the cell with the most places."""
    cell = int(np.argmax(places.size))
    words = text.word[text.next(places)]
    base = np.bincount(words) / len(words)
    count = np.bincount(words[places.cell == cell], minlength=len(base))
    share = count / count.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(count >= 2, share * np.log(share / base), 0.0)
    best = text.words[int(np.argmax(scores))]
    following = labels[cell].description.partition("Comes next: ")[2]
    assert best in following.partition("%")[0].lower()


def test_a_word_that_continues_is_split_where_the_prototype_is(text, places, labels):
    seen = 0
    for cell, label in enumerate(labels):
        if label is None or " → " in label.name or label.name.endswith("…"):
            continue
        sample = places.of(places.cell == cell)
        assert text.continues(sample).mean() >= 0.5
        words = {text.beginning(p).strip() + text.end(p + 1) for p in sample.position.tolist()}
        assert set(label.name.split(", ")) <= words
        assert label.topic[0] == label.name.split(", ")[0].replace("-", "", 1).lower()
        seen += 1
    assert seen > 3


def test_tags_are_overrepresented_domains(lm, places, labels):
    cells, tagged = lm.lens.cells, 0
    names, codes = cells.keys("domain")
    base = cells.base_rates("domain")
    for cell, label in enumerate(labels):
        for tag in label.tags if label else ():
            number = names.index(tag)
            share = (codes[places.document[places.cell == cell]] == number).mean()
            assert share >= max(0.3, 2 * base[number])
            tagged += 1
    assert tagged > 10
