"""Places are positions of the cells, and the text around them is the corpus's own."""

import numpy as np
import pytest

from prismlm.corpus import build_corpus
from prismlm.lens.labels.contexts import Text, Vocabulary, sample_places


@pytest.fixture(scope="module")
def lens(lm):
    return lm.lens


def test_every_position_stands_in_its_cell_once(lens, text):
    cells = lens.cells
    places = sample_places(cells, lens.num_prototypes, len(cells))
    assert sorted(places.position.tolist()) == sorted(cells.positions(0, len(cells)).tolist())
    assert places.size.sum() == len(cells)
    np.testing.assert_array_equal(np.bincount(places.cell, minlength=len(places.size)), places.size)
    keys, starts = cells.keys_and_starts
    owner = np.repeat(keys, np.diff(np.append(starts, len(cells))))
    np.testing.assert_array_equal(places.cell, owner // cells.meta.vocabulary)
    # A position's next token is the one that its range is of.
    np.testing.assert_array_equal(text.next(places), owner % cells.meta.vocabulary)


def test_a_sample_takes_every_next_token_as_often_as_it_is_there(lens, text):
    whole = sample_places(lens.cells, lens.num_prototypes, len(lens.cells))
    some = sample_places(lens.cells, lens.num_prototypes, 40)
    cell = int(np.argmax(whole.size))
    assert whole.size[cell] > 80
    assert (np.bincount(some.cell, minlength=len(whole.size)) == np.minimum(whole.size, 40)).all()
    tokens, count = np.unique(text.next(whole)[whole.cell == cell], return_counts=True)
    expected = 40 * count / whole.size[cell]
    taken = np.array([(text.next(some)[some.cell == cell] == t).sum() for t in tokens])
    assert (np.abs(taken - expected) < 1).all()


def test_windows_stop_at_the_ends_of_their_document(lens, text):
    places = sample_places(lens.cells, lens.num_prototypes, 3)
    window = text.window(places, before=30, after=10)
    corpus = text.corpus
    for row in range(0, len(places.cell), 97):
        position = int(places.position[row])
        number = corpus.document_at(position)
        first = int(corpus.starts[number])
        last = first + int(corpus.lengths[number])
        expected = [
            int(text.tokens[p]) if first <= p < last else -1
            for p in range(position - 29, position + 11)
        ]
        assert window[row].tolist() == expected


def test_a_word_is_put_together_from_its_pieces(text):
    texts = text.vocabulary.texts
    pieces = text.vocabulary.continues[text.tokens] & np.roll(text.vocabulary.open[text.tokens], 1)
    found = [p for p in np.flatnonzero(pieces).tolist() if texts[text.tokens[p - 1]][0] == " "]
    position = found[0]
    head = texts[text.tokens[position - 1]]
    assert text.beginning(position) == head + texts[text.tokens[position]]
    assert text.end(position).startswith("-" + texts[text.tokens[position]])
    assert text.end(position - 1) == head + text.end(position)[1:]


def test_a_part_of_a_character_is_named_by_all_of_it(tiny_model, tmp_path):
    (tmp_path / "text.txt").write_text("a 東京 b ’c’ d", encoding="utf-8")
    corpus = build_corpus(
        tmp_path / "text.txt", tmp_path / "corpus", tokenizer=tiny_model, heldout_fraction=0
    )
    text = Text(corpus, Vocabulary(corpus.tokenizer, len(corpus.tokenizer)))
    parts = [p for p, t in enumerate(text.tokens) if "\ufffd" in text.vocabulary.texts[t]]
    assert len(parts) >= 6
    written = corpus.text(0)
    for position in parts:
        left, right = corpus.spans(0)[position].tolist()
        for word in (text.beginning(position), text.end(position)):
            character, number = word.rsplit(" ", 1)
            assert character == written[left:right]
            assert number[1] == "/"
