"""The tokens of a lens's documents, and a suffix array that finds sequences by binary search.

``suffixes-tokens.npy`` has the documents of the split one after the other, each ending in the
end-of-text token, and ``suffixes-order.npy`` the indices of all its suffixes, sorted. Parts of
whole documents with some 2 million tokens are sorted separately, so that memory does not grow with
the corpus, and each part is searched.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.errors import InputError
from prismlm.lens.layout import array_file, open_array

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

TOKENS_FILE, ORDER_FILE = "suffixes-tokens.npy", "suffixes-order.npy"
DOCUMENTS_FILE = "suffixes-documents.npy"
FILES = (TOKENS_FILE, ORDER_FILE, DOCUMENTS_FILE)
PACKAGE = "pydivsufsort"
# Tokens that are sorted together, unless a single document has more.
PART = 2**21
# Tokens of a query that are compared first, since few longer sequences occur.
FIRST_LENGTH = 32

Tokens = Sequence[int] | np.ndarray


def write_suffixes(directory: Path, corpus: Corpus, split: Split) -> None:
    """Write the tokens of a split into a lens directory; their order if pydivsufsort is installed.

    It takes 2 or 4 bytes a token for the tokens, 4 (8 from 2³² tokens on) for the order, and 24 a
    document. Sorting takes 5·w bytes of memory for each token of a part, with w bytes in the
    largest token id.
    """
    documents = corpus.split(split)
    starts, lengths = corpus.starts[documents], corpus.lengths[documents]
    ends = np.cumsum(lengths)
    stored = np.dtype(corpus.meta["dtype"]).newbyteorder(">")
    with array_file(directory / TOKENS_FILE, stored) as append:
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            append(corpus.tokens(start, length))
    edges = [0]
    while edges[-1] < ends[-1]:  # as many documents as fit in a part, at least one
        following, beyond = np.searchsorted(ends, [edges[-1], edges[-1] + PART], side="right")
        edges.append(int(ends[max(following, beyond - 1)]))
    part = np.searchsorted(edges[1:], ends - lengths, side="right")
    np.save(directory / DOCUMENTS_FILE, np.array([ends - lengths, starts, part], "<i8"))
    if importlib.util.find_spec(PACKAGE) is None:
        return
    tokens = np.load(directory / TOKENS_FILE, mmap_mode="r")
    # Leading bytes that are zero in all tokens are not sorted.
    width = max(1, (int(tokens.max()).bit_length() + 7) // 8)
    indices = np.dtype("<u4" if ends[-1] < 2**32 else "<i8")
    with array_file(directory / ORDER_FILE, indices) as append:
        for first, end in pairwise(edges):
            append(_sorted_suffixes(tokens[first:end], width) + first)


def _sorted_suffixes(tokens: np.ndarray, width: int) -> np.ndarray:
    """Return the indices of the sorted suffixes; big-endian bytes sort as the tokens do."""
    sorter: Any = import_module(PACKAGE)
    text = tokens.view(np.uint8).reshape(-1, tokens.itemsize)[:, -width:]
    order = sorter.divsufsort(np.array(text, order="C").reshape(-1))
    # Drop suffixes that start within a token.
    return order[order % width == 0].astype(np.int64) // width


class StoredTokens:
    """The tokens of the documents of a lens, memory-mapped; positions are those of the corpus."""

    def __init__(self, directory: Path) -> None:
        self._tokens = np.asarray(open_array(directory / TOKENS_FILE))
        self._firsts, self._starts, self._part = np.asarray(open_array(directory / DOCUMENTS_FILE))

    def __len__(self) -> int:
        """The number of tokens, without the ends of documents."""
        return len(self._tokens) - len(self._firsts)

    def tokens(self, position: int, length: int) -> np.ndarray:
        """Return the tokens of one document from a global position on, int64 [length]."""
        document = int(np.searchsorted(self._starts, position, side="right")) - 1
        first = int(self._firsts[document] + position - self._starts[document])
        return self._tokens[first : first + length].astype(np.int64)


class Suffixes(StoredTokens):
    """Occurrences of token sequences in the documents of a lens.

    A search compares about 2·log₂ n suffixes. No match contains an end of text, so that none
    crosses documents.
    """

    def __init__(self, directory: Path) -> None:
        if not (directory / ORDER_FILE).is_file():
            raise InputError(
                f"the lens {directory} cannot find verbatim text: it has no {ORDER_FILE}. Install "
                "the extra verbatim, pip install 'prismlm[verbatim]', and build the lens again "
                "with `prismlm index`."
            )
        super().__init__(directory)
        self._order = np.asarray(open_array(directory / ORDER_FILE))
        edges = self._firsts[np.diff(self._part, prepend=-1) > 0].tolist()
        self._parts = list(pairwise([*edges, len(self._tokens)]))

    def count(self, tokens: Tokens) -> int:
        """Return how often a sequence of one token or more occurs."""
        return sum(map(len, self._rows(tokens)))

    def find(self, tokens: Tokens, limit: int) -> np.ndarray:
        """Return the first ``limit`` positions where a sequence starts, ascending: int64 [m]."""
        columns = [self._order[rows.start : rows.stop] for rows in self._rows(tokens)]
        starts = np.concatenate(columns).astype(np.int64)
        if limit < len(starts):
            starts = np.partition(starts, limit)[:limit]
        starts = np.sort(starts)
        document = np.searchsorted(self._firsts, starts, side="right") - 1
        return starts - self._firsts[document] + self._starts[document]

    def longest_prefix(self, tokens: Tokens) -> tuple[int, int]:
        """Return the length of the longest prefix of a sequence that occurs, and how often."""
        most = FIRST_LENGTH
        while True:
            query = self._encode(tokens[:most])
            length = max(self._matched(query, *part) for part in self._parts)
            if length < most or most >= len(tokens):
                return length, self.count(tokens[:length])
            most *= 2

    def _rows(self, tokens: Tokens) -> list[range]:
        """Return the rows of each part whose suffixes start with a sequence."""
        query = self._encode(tokens)
        if not len(query) or len(query) < len(tokens):
            return [range(0)]
        lows = [(self._row(query, *part, bisect_left), part[1]) for part in self._parts]
        return [range(low, self._row(query, low, end, bisect_right)) for low, end in lows]

    def _row(self, query: np.ndarray, first: int, end: int, bisect: Any) -> int:
        """Return the row of a sequence, or where it would be; big-endian bytes sort as tokens."""

        def read(row: int) -> bytes:
            index = int(self._order[row])
            return self._tokens[index : index + len(query)].tobytes()

        return bisect(range(len(self._order)), query.tobytes(), first, end, key=read)

    def _matched(self, query: np.ndarray, first: int, end: int) -> int:
        """Return the longest common prefix with a suffix of a part, next to the query's row."""
        row, longest = self._row(query, first, end, bisect_left), 0
        for index in self._order[max(first, row - 1) : min(end, row + 1)].tolist():
            suffix = self._tokens[index : index + len(query)]
            differing = np.flatnonzero(suffix != query[: len(suffix)])
            longest = max(longest, int(differing[0]) if len(differing) else len(suffix))
        return longest

    def _encode(self, tokens: Tokens) -> np.ndarray:
        """Return tokens in the stored type, up to the first that cannot occur."""
        ids, stored = np.asarray(tokens, dtype=np.int64), self._tokens
        impossible = (ids < 0) | (ids > np.iinfo(stored.dtype).max) | (ids == stored[-1])
        return ids[: int(impossible.argmax()) if impossible.any() else None].astype(stored.dtype)
