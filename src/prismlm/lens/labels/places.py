"""Sampled positions of every cell, and the corpus text around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy import sparse

from prismlm.corpus.pieces import BROKEN, decode_token, pieces_of, token_alone
from prismlm.corpus.store import Corpus
from prismlm.lens.cells import Cells
from prismlm.lens.labels.categories import Vocabulary

ROWS_AT_ONCE = 2**16
# The surrounding text of a position: tokens up to the one read last, and after it.
BEFORE, AFTER = 24, 8
MAX_PIECES = 6
# UTF-8 bytes of a character, and so the most tokens it can be split into.
MOST_BYTES = 4


class Places(NamedTuple):
    """Sampled positions in the order of cells, int64 [n] each."""

    cell: np.ndarray
    position: np.ndarray  # global, of the token read last
    document: np.ndarray  # the row in the cells' documents
    size: np.ndarray  # of each cell, without sampling, [K]

    def of(self, chosen: np.ndarray | slice) -> Places:
        """Return a subset, by mask, indices or slice."""
        return Places(self.cell[chosen], self.position[chosen], self.document[chosen], self.size)


def sample_places(cells: Cells, num_cells: int, most: int) -> Places:
    """Return at most ``most`` positions of every cell, the same every time.

    The rows of a cell are sorted by next token, so that equal steps through them take each next
    token in proportion.
    """
    keys, starts = cells.keys_and_starts
    first = np.searchsorted(keys, np.arange(num_cells + 1) * cells.meta.vocabulary)
    bounds = np.append(starts, len(cells))[first]
    size = np.diff(bounds)
    taken = np.minimum(size, most)
    cell = np.repeat(np.arange(num_cells), taken)
    number = np.arange(len(cell)) - np.repeat(np.cumsum(taken) - taken, taken)
    rows = bounds[cell] + (2 * number + 1) * size[cell] // (2 * taken[cell])
    parts = [
        cells.records(rows[start : start + ROWS_AT_ONCE])["position"]
        for start in range(0, len(rows), ROWS_AT_ONCE)
    ]
    position = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)
    return Places(cell, position, cells.document_of(position), size)


class Text:
    """The tokens of a corpus, to be read around places; ``tokens`` are all of them, [N]."""

    def __init__(self, corpus: Corpus, vocabulary: Vocabulary) -> None:
        self.corpus, self.vocabulary = corpus, vocabulary
        self.tokens = corpus.tokens(0, corpus.num_tokens).astype(np.int64)

    def read(self, places: Places) -> np.ndarray:
        """Return the token read last at each place, int64 [n]."""
        return self.tokens[places.position]

    def next(self, places: Places) -> np.ndarray:
        """Return the token that comes next, int64 [n]."""
        return self.tokens[places.position + 1]

    def goes_on(self, places: Places) -> np.ndarray:
        """Return where the next token continues the word of the one read last, bool [n]."""
        vocabulary = self.vocabulary
        return vocabulary.open[self.read(places)] & vocabulary.goes_on[self.next(places)]

    def window(self, places: Places, before: int, after: int) -> np.ndarray:
        """Return ``before`` tokens up to the one read last and ``after`` after it.

        Tokens outside the document, and the tokenizer's prefix, are −1: int64 [n, before + after].
        """
        positions = places.position[:, None] + np.arange(1 - before, after + 1)
        starts = self.corpus.starts
        number = np.searchsorted(starts, places.position, side="right") - 1
        first = starts[number][:, None]
        last = first + self.corpus.lengths[number][:, None]
        inside = (positions >= first + len(self.corpus.prefix)) & (positions < last)
        return np.where(inside, self.tokens[np.where(inside, positions, 0)], -1)

    def beginning(self, position: int) -> str:
        """Return a word up to and including the token at a position."""
        if self._is_partial(position):
            return self._character(position)
        first = position
        while position - first < MAX_PIECES and first > 0 and self._joined(first - 1):
            first -= 1
        return self._join(first, position)

    def end(self, position: int) -> str:
        """Return a word from the token at a position on; "-" where it started before."""
        if self._is_partial(position):
            return self._character(position)
        last = position
        while last - position < MAX_PIECES and self._joined(last):
            last += 1
        # Some tokenizers write the space before a number separately.
        if last == position and self.vocabulary.texts[self.tokens[position]] == " ":
            last = min(position + 1, len(self.tokens) - 1)
        return "-" * self._joined(position - 1) + self._join(position, last)

    def spelled(self, tokens: list[int]) -> str:
        """Decode consecutive tokens, with the space before the first."""
        return decode_token(self.corpus.tokenizer, *tokens) if tokens else ""

    def _join(self, first: int, last: int) -> str:
        texts = self.vocabulary.texts
        return "".join(texts[token] for token in self.tokens[first : last + 1].tolist())

    def _is_partial(self, position: int) -> bool:
        """Whether a token holds only some bytes of a character."""
        return BROKEN in self.vocabulary.texts[self.tokens[position]]

    def _character(self, position: int) -> str:
        """Return the character that a token is a part of, and which part: ``’ 1/2``."""
        first, tokenizer = max(0, position - MOST_BYTES), self.corpus.tokenizer
        ids = self.tokens[first : position + MOST_BYTES].tolist()
        label = pieces_of(tokenizer, ids)[position - first].label
        return token_alone(tokenizer, ids[position - first]) if BROKEN in label else label

    def _joined(self, position: int) -> bool:
        """Whether the token at a position and the next one are parts of one word."""
        if position + 1 >= len(self.tokens):
            return False
        left, right = self.tokens[position], self.tokens[position + 1]
        return bool(self.vocabulary.open[left] and self.vocabulary.goes_on[right])


class Marked(NamedTuple):
    """The text around a place, with the token read last as ``<<token>>``, and the next token."""

    text: str
    next: str


def marked(text: Text, places: Places, row: int, before: int, after: int) -> Marked:
    """Return a place with so many tokens on each side; other ``<<`` and ``>>`` are replaced."""
    window = text.window(places.of(slice(row, row + 1)), before, after)[0]
    left, token, following, right = (
        text.spelled(part[part >= 0].tolist()).replace("<<", "‹‹").replace(">>", "››")
        for part in np.split(window, (before - 1, before, before + 1))
    )
    return Marked(f"{left}<<{token}>>{following}{right}", following)


def count_words(cell: np.ndarray, word: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """Return how often each word occurs at the places of each cell, [K, words]."""
    return sparse.csr_matrix((np.ones(len(cell), np.float32), (cell, word)), shape=shape)


def count_content_words(text: Text, places: Places, shape: tuple[int, int]) -> sparse.csr_matrix:
    """Return at how many places of each cell each content word is near, [K, words]."""
    total = sparse.csr_matrix(shape, dtype=np.float32)
    for start in range(0, len(places.cell), ROWS_AT_ONCE):
        part = places.of(slice(start, start + ROWS_AT_ONCE))
        near = words_near(text, part)
        place, _ = np.nonzero(near >= 0)
        # A word counts once per place.
        place, word = np.divmod(np.unique(place * shape[1] + near[near >= 0]), shape[1])
        total += count_words(part.cell[place], word, shape)
    return total


def words_near(text: Text, places: Places) -> np.ndarray:
    """Return the content word that each token near places starts, or −1, [n, tokens]."""
    vocabulary, window = text.vocabulary, text.window(places, BEFORE, AFTER)
    return np.where((window >= 0) & vocabulary.content[window], vocabulary.word[window], -1)


def most_common(words: Iterable[str]) -> str:
    """Return the most frequent word, the first of equals."""
    return Counter(words).most_common(1)[0][0]
