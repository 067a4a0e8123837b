"""Places are positions of cells, with the corpus's own text; names say what was counted."""

import re

import numpy as np
import pytest
import torch

from prismlm.corpus import Corpus, build_corpus
from prismlm.lens.labels.contexts import (
    CATEGORIES,
    NAME_LENGTH,
    SUBJECTS,
    Namer,
    Text,
    kind_rates,
    sample_places,
    subject_words,
)
from prismlm.models.sidecar import weight_of


@pytest.fixture(scope="module")
def every(lm):
    """All positions of all cells."""
    return sample_places(lm.lens.cells, lm.lens.num_prototypes, len(lm.lens.cells))


def test_every_position_is_in_its_cell_once(lm, text, every):
    cells, places = lm.lens.cells, every
    positions = cells.records(np.arange(len(cells)))["position"]
    assert sorted(places.position.tolist()) == sorted(positions.tolist())
    np.testing.assert_array_equal(np.bincount(places.cell, minlength=len(places.size)), places.size)
    keys, starts = cells.keys_and_starts
    owner = np.repeat(keys, np.diff(np.append(starts, len(cells))))
    np.testing.assert_array_equal(places.cell, owner // cells.meta.vocabulary)
    np.testing.assert_array_equal(text.next(places), owner % cells.meta.vocabulary)


def test_a_sample_takes_next_tokens_in_proportion(lm, text, every):
    some = sample_places(lm.lens.cells, lm.lens.num_prototypes, 40)
    cell = int(np.argmax(every.size))
    assert every.size[cell] > 80
    assert (np.bincount(some.cell, minlength=len(every.size)) == np.minimum(every.size, 40)).all()
    tokens, count = np.unique(text.next(every)[every.cell == cell], return_counts=True)
    sampled = text.next(some)[some.cell == cell]
    expected = 40 * count / every.size[cell]
    assert (np.abs([(sampled == token).sum() for token in tokens] - expected) < 1).all()


def test_windows_stop_at_the_ends_of_their_document(text, places):
    window, corpus = text.window(places, before=30, after=10), text.corpus
    for row, position in enumerate(places.position.tolist()[::97]):
        number = corpus.document_at(position)
        first = int(corpus.starts[number])
        last = first + int(corpus.lengths[number])
        around = range(position - 29, position + 11)
        expected = [int(text.tokens[p]) if first <= p < last else -1 for p in around]
        assert window[97 * row].tolist() == expected


def test_a_word_is_put_together_from_its_pieces(text):
    texts, tokens = text.texts, text.tokens
    pieces = np.flatnonzero(text.inner[tokens] & np.roll(text.open[tokens], 1)).tolist()
    position = next(p for p in pieces if texts[tokens[p - 1]][0] == " ")
    head = texts[tokens[position - 1]]
    assert text.beginning(position) == head + texts[tokens[position]]
    assert text.end(position).startswith("-" + texts[tokens[position]])
    assert text.end(position - 1) == head + text.end(position)[1:]


def test_a_part_of_a_character_is_named_by_the_character(tiny_model, tmp_path):
    (tmp_path / "text.txt").write_text("a 東京 b ’c’ d", encoding="utf-8")
    out = tmp_path / "corpus"
    corpus = build_corpus(tmp_path / "text.txt", out, tokenizer=tiny_model, heldout_fraction=0)
    text = Text(corpus, len(corpus.tokenizer))
    parts = [p for p, t in enumerate(text.tokens) if "\ufffd" in text.texts[t]]
    assert len(parts) >= 6
    for position in parts:
        left, right = corpus.spans(0)[position].tolist()
        for word in (text.beginning(position), text.end(position)):
            character, number = word.rsplit(" ", 1)
            assert character == corpus.text(0)[left:right]
            assert number[1] == "/"


def test_kinds(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    text = Text(corpus, len(corpus.tokenizer) + 3)  # of a padded vocabulary
    for kind, those, others in (
        ("inner", ["ing", "The"], [" the", ",", "\n", "1"]),
        ("open", [" the", "s"], [",", "\n", "1"]),
        ("digit", ["1"], [" the", ","]),
        ("line", ["\n"], [" ", " the"]),
        ("sign", [",", ".", "("], ["\n", " the", "1", " "]),
        ("markup", ["=", "_"], [",", ".", "("]),
        ("capital", [" The"], [" I", " the", "The"]),
    ):
        flags = dict(zip(text.texts, getattr(text, kind).tolist(), strict=True))
        assert [t for t in (*those, *others) if flags[t]] == those, kind


def test_a_subject_has_the_words_near_its_seeds(tiny_corpus):
    text = Text(Corpus.open(tiny_corpus), 8192)
    generator, names = torch.Generator().manual_seed(0), list(SUBJECTS)
    weight = torch.randn(len(text.texts), 64, generator=generator)
    number = {token: i for i, token in enumerate(text.texts)}
    seeds = {name: [w for w in SUBJECTS[name].split() if f" {w}" in number] for name in names}
    for direction, words in enumerate(seeds.values()):
        for word in words:
            weight[number[f" {word}"], direction] += 20
    # A word of no list, near those of the subject with the most words that are tokens here.
    subject = max(names, key=lambda name: len(seeds[name]))
    assert len(seeds[subject]) >= 3
    weight[number[" said"], names.index(subject)] += 20
    # What all words vary in most, of whatever subject.
    weight[:, 50:58] = 300 * torch.randn(len(text.texts), 8, generator=generator)
    matrix = subject_words(weight, text)
    for word in ("said", seeds[subject][0]):
        row = matrix[text.words.index(word)].toarray()[0]
        assert row.tolist() == [float(name == subject) for name in names]
    # Each word is of one subject at most, and most are of none.
    assert matrix.sum(1).max() == 1
    assert matrix.sum(1).mean() < 0.2


@pytest.fixture(scope="module")
def places(lm):
    return sample_places(lm.lens.cells, lm.lens.num_prototypes, 100)


@pytest.fixture(scope="module")
def labels(lm, text, places):
    return Namer(text, places, lm.lens, weight_of(lm.model)).labels()


def test_every_cell_with_a_place_is_named(places, labels):
    occupied = np.bincount(places.cell, minlength=len(labels)) > 0
    assert [label is not None for label in labels] == occupied.tolist()
    for label in filter(None, labels):
        assert " → " in label.name or "-" in label.name
        assert len(label.name) <= NAME_LENGTH
        assert label.category in CATEGORIES


def test_shares_are_those_of_the_places_and_order_words_by_how_much_they_tell(text, places, labels):
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
    # p ln(p / base), by hand for the cell with the most places.
    cell = int(np.argmax(places.size))
    base = np.bincount(following) / len(following)
    count = np.bincount(following[places.cell == cell], minlength=len(base))
    share = count / count.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(count >= 2, share * np.log(share / base), 0.0)
    listed = labels[cell].description.partition("Comes next: ")[2]
    assert words[int(np.argmax(scores))] in listed.partition("%")[0].lower()


def test_rates_of_a_kind_are_those_of_the_places_of_each_cell(text, every):
    cells, joined = np.unique(every.cell), text.joined(every.position)
    expected = [joined[every.cell == cell].mean() for cell in cells]
    np.testing.assert_allclose(kind_rates(text, every)["piece"][cells], expected)


def test_a_word_that_continues_is_split_where_the_prototype_is(text, places, labels):
    seen = 0
    for cell, label in enumerate(labels):
        if label is None or " → " in label.name or label.name.endswith("…"):
            continue
        sample = places.of(places.cell == cell)
        assert text.joined(sample.position).mean() >= 0.5
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
