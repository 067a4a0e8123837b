"""The places that name a prototype: positions of its cell, and the text around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy import sparse

from prismlm.corpus.pieces import BROKEN, decode_token, pieces_of, token_alone
from prismlm.corpus.store import Corpus
from prismlm.lens.cells import Cells
from prismlm.lens.labels.vocabulary import Vocabulary

ROWS_AT_ONCE = 2**16
# Tokens before the one that was read last, and after the next, that say what a text is about.
BEFORE, AFTER = 24, 8
MAX_PIECES = 6
# Places that say how a word is written.
SOME = 8
# Of a character, at most; and so the most tokens.
MOST_BYTES = 4


class Places(NamedTuple):
    """Some positions of every cell, in the order of cells.

    Attributes:
        cell: int64 [n].
        position: of the token read last, global, int64 [n].
        document: its number in the cells' table, int64 [n].
        size: positions of each cell, those that are not here among them, int64 [K].
    """

    cell: np.ndarray
    position: np.ndarray
    document: np.ndarray
    size: np.ndarray

    def of(self, chosen: np.ndarray | slice) -> Places:
        """Return some of them, by a bool for each, by numbers or as a slice."""
        return Places(self.cell[chosen], self.position[chosen], self.document[chosen], self.size)


def sample_places(cells: Cells, num_cells: int, most: int) -> Places:
    """Return at most ``most`` positions of every cell, evenly spread over its next tokens.

    A cell's rows are in the order of next tokens, so equal steps through them take each token as
    often as it is there, and the same positions every time.
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
    """The tokens of a corpus around places.

    Attributes:
        tokens: of the whole corpus, mapped from its files where that is one piece, [N].
    """

    def __init__(self, corpus: Corpus, vocabulary: Vocabulary) -> None:
        self.corpus, self.vocabulary = corpus, vocabulary
        self.tokens = corpus.tokens(0, corpus.num_tokens).astype(np.int64)
        self._starts = corpus.starts

    def read(self, places: Places) -> np.ndarray:
        """Return the token that was read last at each place, int64 [n]."""
        return self.tokens[places.position]

    def next(self, places: Places) -> np.ndarray:
        """Return the token that came next, int64 [n]."""
        return self.tokens[places.position + 1]

    def goes_on(self, places: Places) -> np.ndarray:
        """Return where the next token goes on with the word that was read last, bool [n]."""
        kinds = self.vocabulary
        return kinds.open[self.read(places)] & kinds.goes_on[self.next(places)]

    def window(self, places: Places, before: int, after: int) -> np.ndarray:
        """Return the tokens from ``before`` − 1 before the one read last to ``after`` after it.

        Those of other documents, and what stands before a text, are −1: int64 [n, before + after].
        """
        offsets = np.arange(1 - before, after + 1)
        positions = places.position[:, None] + offsets
        number = np.searchsorted(self._starts, places.position, side="right") - 1
        first = self._starts[number][:, None]
        last = first + self.corpus.lengths[number][:, None]
        inside = (positions >= first + len(self.corpus.prefix)) & (positions < last)
        return np.where(inside, self.tokens[np.where(inside, positions, 0)], -1)

    def beginning(self, position: int) -> str:
        """Return a word up to and with the token at a position, as it is written."""
        if self._part(position):
            return self._of_character(position)
        first = position
        while position - first < MAX_PIECES and first > 0 and self._joined(first - 1):
            first -= 1
        return self._written(first, position)

    def end(self, position: int) -> str:
        """Return a word from the token at a position on; "-" where it begins before."""
        if self._part(position):
            return self._of_character(position)
        last = position
        while last - position < MAX_PIECES and self._joined(last):
            last += 1
        # A tokenizer may write the space before a number by itself.
        if last == position and self.vocabulary.texts[self.tokens[position]] == " ":
            last = min(position + 1, len(self.tokens) - 1)
        return "-" * self._joined(position - 1) + self._written(position, last)

    def spelled(self, tokens: list[int]) -> str:
        """Return tokens that stand together as text, with the space before the first."""
        return decode_token(self.corpus.tokenizer, *tokens) if tokens else ""

    def _written(self, first: int, last: int) -> str:
        texts = self.vocabulary.texts
        return "".join(texts[token] for token in self.tokens[first : last + 1].tolist())

    def _part(self, position: int) -> bool:
        """Say whether a token holds only some bytes of a character."""
        return BROKEN in self.vocabulary.texts[self.tokens[position]]

    def _of_character(self, position: int) -> str:
        """Return the character that a token is a part of, and which: ``’ 1/2``."""
        first, tokenizer = max(0, position - MOST_BYTES), self.corpus.tokenizer
        ids = self.tokens[first : position + MOST_BYTES].tolist()
        label = pieces_of(tokenizer, ids)[position - first].label
        return token_alone(tokenizer, ids[position - first]) if BROKEN in label else label

    def _joined(self, position: int) -> bool:
        kinds = self.vocabulary
        if position + 1 >= len(self.tokens):
            return False
        left, right = self.tokens[position], self.tokens[position + 1]
        return bool(kinds.open[left] and kinds.goes_on[right])


class Marked(NamedTuple):
    """A place with the text around it: the token that was read last as ``<<token>>``, the next."""

    text: str
    next: str


def marked(text: Text, places: Places, row: int, before: int, after: int) -> Marked:
    """Return a place with so many tokens on each side; what looks like a mark in it is changed."""
    window = text.window(places.of(slice(row, row + 1)), before, after)[0]
    parts = np.split(window, (before - 1, before, before + 1))
    left, token, following, right = (
        text.spelled(part[part >= 0].tolist()).replace("<<", "‹‹").replace(">>", "››")
        for part in parts
    )
    return Marked(f"{left}<<{token}>>{following}{right}", following)


def counts(cell: np.ndarray, word: np.ndarray, num_cells: int, words: int) -> sparse.csr_matrix:
    """Return how often each word stands at the places of each cell, [K, words]."""
    ones = np.ones(len(cell), np.float32)
    return sparse.csr_matrix((ones, (cell, word)), shape=(num_cells, words))


def words_near(text: Text, places: Places) -> np.ndarray:
    """Return which word with content each token near places begins, −1 for none, [n, tokens]."""
    kinds, window = text.vocabulary, text.window(places, BEFORE, AFTER)
    return np.where((window >= 0) & kinds.content[window], kinds.word[window], -1)


def most_common(words: Iterable[str]) -> str:
    """Return the most frequent of some words, of equals the first."""
    return Counter(words).most_common(1)[0][0]


def around(text: Text, places: Places, num_cells: int) -> sparse.csr_matrix:
    """Return at how many places of each cell each word with content is near, [K, words]."""
    kinds = text.vocabulary
    total = sparse.csr_matrix((num_cells, len(kinds.words)), dtype=np.float32)
    for start in range(0, len(places.cell), ROWS_AT_ONCE):
        part = places.of(slice(start, start + ROWS_AT_ONCE))
        near = words_near(text, part)
        place, _ = np.nonzero(near >= 0)
        # A word counts once a place.
        once = np.unique(place * len(kinds.words) + near[near >= 0])
        place, word = np.divmod(once, len(kinds.words))
        total += counts(part.cell[place], word, num_cells, len(kinds.words))
    return total
