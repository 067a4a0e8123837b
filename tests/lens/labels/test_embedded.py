"""Names say what was counted."""

import re

import numpy as np
import pytest

from prismlm.lens.labels.contexts import CATEGORIES, sample_places, subject_words
from prismlm.lens.labels.embedded import NAME_LENGTH, Namer
from prismlm.models.sidecar import weight_of


@pytest.fixture(scope="module")
def named(lm, text):
    weight = weight_of(lm.model).detach()
    places = sample_places(lm.lens.cells, lm.lens.num_prototypes, 100)
    subjects = subject_words(weight, text.vocabulary)
    raised = lm.lens.prototypes["top_tokens"].to_pylist()
    return lm.lens, text, places, Namer(text, places, lm.lens.cells, subjects, raised).labels()


def test_every_cell_with_a_place_is_named(named):
    _, _, places, labels = named
    there = np.bincount(places.cell, minlength=len(labels)) > 0
    assert [label is not None for label in labels] == there.tolist()
    for label in filter(None, labels):
        assert " → " in label.name or "-" in label.name
        assert len(label.name) <= NAME_LENGTH
        # Whole words, and brackets that are closed.
        assert label.name.count("(") == label.name.count(")") or "“" in label.name
        assert label.category in CATEGORIES


def test_shares_are_those_of_the_places(named):
    """Counted again, a place at a time."""
    _, text, places, labels = named
    words, compared = text.vocabulary.words, 0
    for cell, label in enumerate(labels):
        rows = np.flatnonzero(places.cell == cell)
        if label is None or len(rows) < 8:
            continue
        said = re.match(r"Read last: .*?\. Comes next: (.*?)\.(?= |$)", label.description)
        for word, share in re.findall(r"(?:^|, )([a-z]{3,}) (\d+)%", said.group(1)):
            if word not in words:
                continue
            number = words.index(word)
            next_words = text.vocabulary.word[text.tokens[places.position[rows] + 1]]
            assert int(share) == round(100 * float((next_words == number).mean()))
            compared += 1
    assert compared > 20


def test_words_are_ordered_by_how_much_they_tell(named):
    """p ln(p / base), by hand for the cell with the most places."""
    _, text, places, labels = named
    cell = int(np.argmax(places.size))
    words = text.vocabulary.word[text.next(places)]
    base = np.bincount(words) / len(words)
    own = np.bincount(words[places.cell == cell], minlength=len(base))
    share = own / own.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        told = np.where(own >= 2, share * np.log(share / base), 0.0)
    best = text.vocabulary.words[int(np.argmax(told))]
    description = labels[cell].description
    following = description.partition("Comes next: ")[2]
    assert best in following.partition("%")[0].lower()


def test_a_word_that_goes_on_is_parted_where_the_prototype_is(named):
    _, text, places, labels = named
    seen = 0
    for cell, label in enumerate(labels):
        if label is None or " → " in label.name or label.name.endswith("…"):
            continue
        own = places.of(places.cell == cell)
        assert text.continues(own).mean() >= 0.5
        words = {text.beginning(at).strip() + text.end(at + 1) for at in own.position.tolist()}
        assert set(label.name.split(", ")) <= words
        assert label.topic[0] == label.name.split(", ")[0].replace("-", "", 1).lower()
        seen += 1
    assert seen > 3


def test_tags_are_domains_that_are_there_more_often_than_elsewhere(named):
    lens, _, places, labels = named
    names, codes = lens.cells.keys("domain")
    base = lens.cells.base_rates("domain")
    tagged = 0
    for cell, label in enumerate(labels):
        for tag in label.tags if label else ():
            number = names.index(tag)
            share = (codes[places.document[places.cell == cell]] == number).mean()
            assert share >= 0.3
            assert share >= 2 * base[number]
            tagged += 1
    assert tagged > 10
