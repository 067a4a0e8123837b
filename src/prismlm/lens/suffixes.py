"""Every token sequence of a lens's documents, found in a few dozen looks: a suffix array.

The documents of the split stand one after the other in ``suffixes-tokens.npy``, each ended by the
end-of-text token, and ``suffixes-order.npy`` lists all places of it in the order of the tokens that
follow. What begins with the same tokens stands together there, so a binary search finds it. Whole
documents of some 2 million tokens are ordered at a time, so that memory does not grow with the
corpus, and each such part is searched.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.errors import InputError
from prismlm.lens.layout import array_file, open_array

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

TOKENS_FILE = "suffixes-tokens.npy"
ORDER_FILE = "suffixes-order.npy"
DOCUMENTS_FILE = "suffixes-documents.npy"
FILES = (TOKENS_FILE, ORDER_FILE, DOCUMENTS_FILE)
PACKAGE = "pydivsufsort"
# Tokens that are ordered together, unless a single document has more.
PART = 2**21
# Places up to here fit 4 bytes.
LARGEST_SHORT = 2**32 - 1
FIRST_LOOK = 32

Tokens = Sequence[int] | np.ndarray


def write_suffixes(directory: Path, corpus: Corpus, split: Split) -> None:
    """Write the suffix array of a split into a lens directory, where pydivsufsort is installed.

    The lens then needs the corpus no more: it keeps a copy of the n tokens, 2 or 4 bytes each, the
    order of their n places, 4 bytes each (8 from 2³² tokens on), and 24 bytes a document. Memory:
    5·w bytes for each of 2 million tokens, w being the bytes of the largest token id; more if one
    document is longer.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return
    documents = corpus.split(split)
    starts, lengths = corpus.starts[documents], corpus.lengths[documents]
    ends = np.cumsum(lengths)
    firsts, total = ends - lengths, int(ends[-1])
    stored = np.dtype(corpus.meta["dtype"]).newbyteorder(">")
    with array_file(directory / TOKENS_FILE, stored) as append:
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            append(corpus.tokens(start, length))
    tokens = np.load(directory / TOKENS_FILE, mmap_mode="r")
    places = np.dtype("<u4" if total <= LARGEST_SHORT else "<i8")
    parts = parts_of(firsts, total)
    with array_file(directory / ORDER_FILE, places) as append:
        for order in _orders(tokens, parts):
            append(order)
    part = np.searchsorted([end for _, end in parts], firsts, side="right")
    np.save(directory / DOCUMENTS_FILE, np.array([firsts, starts, part], "<i8"))


def _orders(tokens: np.ndarray, parts: Iterable[tuple[int, int]]) -> Iterator[np.ndarray]:
    """Yield the places of all suffixes of each part, in the order of what follows them."""
    sorter: Any = import_module(PACKAGE)
    # Big-endian bytes sort as the tokens do; those that are zero in every token are left out.
    size, width = tokens.itemsize, max(1, (int(tokens.max()).bit_length() + 7) // 8)
    for first, end in parts:
        text = tokens[first:end].view(np.uint8).reshape(-1, size)
        order = sorter.divsufsort(np.array(text[:, size - width :], order="C").reshape(-1))
        # Suffixes within a token are no suffixes of the tokens.
        yield first + order[order % width == 0].astype(np.int64) // width


def parts_of(firsts: np.ndarray, total: int) -> list[tuple[int, int]]:
    """Return where parts of whole documents begin and end: as large as fits, or one document."""
    ends, edges = np.append(firsts[1:], total), [0]
    while edges[-1] < total:
        following, beyond = np.searchsorted(ends, [edges[-1], edges[-1] + PART], side="right")
        edges.append(int(ends[max(following, beyond - 1)]))
    return list(pairwise(edges))


class Suffixes:
    """Where token sequences stand in the documents of a lens. Open one with :meth:`open`.

    Nothing is read before a question is asked: a search looks at about 2·log₂ n places. Positions
    are those of the corpus: global int64 token offsets. No match holds an end of text, so none goes
    beyond a document; a sequence with one in it stands nowhere.
    """

    def __init__(self, tokens: np.ndarray, order: np.ndarray, documents: np.ndarray) -> None:
        self._tokens, self._order = tokens, order
        self._firsts, self._starts, part = documents
        edges = self._firsts[np.diff(part, prepend=-1) > 0].tolist()
        self._parts = list(pairwise([*edges, len(tokens)]))
        self._end_of_text = int(tokens[-1])

    @classmethod
    def open(cls, directory: Path | str) -> Suffixes:
        """Open the suffix array of a lens directory; InputError where the lens has none."""
        path = Path(directory)
        if not has_suffixes(path):
            raise InputError(
                f"the lens {path} cannot say what stands in its corpus word for word: it has no "
                f"{ORDER_FILE}. Install prismlm with its extra verbatim, pip install "
                "'prismlm[verbatim]', and build the lens again with `prismlm index`."
            )
        return cls(*(np.asarray(open_array(path / name)) for name in FILES))

    def __len__(self) -> int:
        """How many tokens can be found: all but the ends of documents."""
        return len(self._tokens) - len(self._firsts)

    def tokens(self, position: int, length: int) -> np.ndarray:
        """Return the tokens of one document from a global position on, int64 [length]."""
        document = int(np.searchsorted(self._starts, position, side="right")) - 1
        first = int(self._firsts[document] + position - self._starts[document])
        return self._tokens[first : first + length].astype(np.int64)

    def count(self, tokens: Tokens) -> int:
        """Return how often a sequence of one token or more stands in the documents."""
        return sum(map(len, self.rows(tokens)))

    def find(self, tokens: Tokens, limit: int) -> np.ndarray:
        """Return the first ``limit`` positions that a sequence begins at, ascending: int64 [m].

        It reads all places of the sequence, 4 or 8 bytes each.
        """
        columns = [self._order[rows.start : rows.stop] for rows in self.rows(tokens)]
        found = np.concatenate(columns).astype(np.int64)
        if limit < len(found):
            found = np.partition(found, limit)[:limit]
        found = np.sort(found)
        document = np.searchsorted(self._firsts, found, side="right") - 1
        return found - self._firsts[document] + self._starts[document]

    def longest_prefix(self, tokens: Tokens) -> tuple[int, int]:
        """Return how many of the first tokens stand in the documents together, and how often.

        Where not even the first token does, 0 and 0.
        """
        look = FIRST_LOOK
        while True:
            # Few sequences stand there for long: comparing all of a text would be slow.
            length = self._matched(self._encode(tokens[:look]))
            if length < look or look >= len(tokens):
                return length, self.count(tokens[:length])
            look *= 2

    def rows(self, tokens: Tokens) -> list[range]:
        """Return the rows of the order, in each part, that begin with a sequence."""
        wanted = self._encode(tokens)
        if not len(wanted) or len(wanted) < len(tokens):
            return [range(0)]
        found: list[range] = []
        for first, end in self._parts:
            low = self._row(wanted, first, end, bisect_left)
            found.append(range(low, self._row(wanted, low, end, bisect_right)))
        return found

    def _row(self, wanted: np.ndarray, first: int, end: int, bisect: Any) -> int:
        """Return where a sequence is, or would be, among some rows: big-endian bytes in order."""

        def read(row: int) -> bytes:
            at = int(self._order[row])
            return self._tokens[at : at + len(wanted)].tobytes()

        return bisect(range(len(self._order)), wanted.tobytes(), first, end, key=read)

    def _matched(self, wanted: np.ndarray) -> int:
        """Return how many of the first tokens stand somewhere: beside the place to insert them."""
        longest = 0
        for first, end in self._parts:
            row = self._row(wanted, first, end, bisect_left)
            for near in self._order[max(first, row - 1) : min(end, row + 1)].tolist():
                found = self._tokens[near : near + len(wanted)]
                differing = np.flatnonzero(found != wanted[: len(found)])
                longest = max(longest, int(differing[0]) if len(differing) else len(found))
        return longest

    def _encode(self, tokens: Tokens) -> np.ndarray:
        """Return tokens as they are stored, up to the first that stands in no document."""
        ids, dtype = np.asarray(tokens, dtype=np.int64), self._tokens.dtype
        nowhere = (ids < 0) | (ids > np.iinfo(dtype).max) | (ids == self._end_of_text)
        return ids[: int(nowhere.argmax()) if nowhere.any() else None].astype(dtype)


def has_suffixes(directory: Path) -> bool:
    """Say whether a lens directory has a suffix array, whole or in part."""
    return any((directory / name).is_file() for name in FILES)
