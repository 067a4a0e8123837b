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
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.errors import FormatError, InputError
from prismlm.files import atomic_file, share
from prismlm.index.blocks import BLOCK_BYTES, Blocks, checksums_of
from prismlm.index.layout import open_array
from prismlm.index.sort_cells import array_file

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

TOKENS_FILE = "suffixes-tokens.npy"
ORDER_FILE = "suffixes-order.npy"
DOCUMENTS_FILE = "suffixes-documents.npy"
# Of 64 KB of the tokens each, then of the order.
CHECKSUMS_FILE = "suffixes-checksums.npy"
SMALL_FILES = (DOCUMENTS_FILE, CHECKSUMS_FILE)
FILES = (TOKENS_FILE, ORDER_FILE, *SMALL_FILES)
PACKAGE = "pydivsufsort"
PIECE = 2**18
# Tokens that are ordered together, unless a single document has more.
PART = 2**21
# Places up to here fit 4 bytes.
LARGEST_SHORT = 2**32 - 1
FIRST_LOOK = 32

Tokens = Sequence[int] | np.ndarray


def write_suffixes(directory: Path, corpus: Corpus, split: Split) -> None:
    """Write the suffix array of a split into a lens directory; the same input gives the same bytes.

    Nothing is written without the package pydivsufsort, which sorts.

    The lens then needs the corpus no more: it keeps a copy of the n tokens, 2 or 4 bytes each, the
    order of their n places, 4 bytes each (8 from 2³² tokens on), and 24 bytes a document.

    Memory: 5·w bytes for each of 2 million tokens, w being the bytes of the largest token id: 21 MB
    up to 65,536 tokens in the vocabulary, 31 MB above; more if one document is longer.

    Raises:
        InputError: the split has no documents.
        FormatError: the corpus is damaged.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return
    documents = corpus.split(split)
    if not len(documents):
        raise InputError(
            f"the corpus {corpus.name} has no documents in its {split} split: choose another split."
        )
    starts, lengths = corpus.starts[documents], corpus.lengths[documents]
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    stored = np.dtype(corpus.meta["dtype"]).newbyteorder(">")
    _write(directory / TOKENS_FILE, stored, _pieces(corpus, starts, lengths))
    tokens = np.load(directory / TOKENS_FILE, mmap_mode="r")
    places = np.dtype("<u4" if total <= LARGEST_SHORT else "<i8")
    firsts = ends - lengths
    parts = parts_of(firsts, total)
    _write(directory / ORDER_FILE, places, _sorted(tokens, parts))
    part = np.searchsorted([end for _, end in parts], firsts, side="right")
    np.save(directory / DOCUMENTS_FILE, np.array([firsts, starts, part], "<i8"))
    share(directory / DOCUMENTS_FILE)
    write_checksums(directory)


def write_checksums(directory: Path) -> None:
    """Write the checksums of the tokens and their order, which are read a little at a time."""
    arrays = (np.load(directory / name, mmap_mode="r") for name in (TOKENS_FILE, ORDER_FILE))
    np.save(directory / CHECKSUMS_FILE, np.concatenate([checksums_of(array) for array in arrays]))
    share(directory / CHECKSUMS_FILE)


def _pieces(corpus: Corpus, starts: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the tokens of documents, those that stand side by side in the corpus together."""
    follows = starts[1:] != starts[:-1] + lengths[:-1]
    first = np.concatenate([[True], follows])
    last = np.concatenate([follows, [True]])
    for start, end in zip(starts[first].tolist(), (starts + lengths)[last].tolist(), strict=True):
        for at in range(start, end, PIECE):
            yield corpus.tokens(at, min(PIECE, end - at))


def _sorted(tokens: np.ndarray, parts: Iterable[tuple[int, int]]) -> Iterator[np.ndarray]:
    """Yield the places of all suffixes, part after part in order, a piece at a time."""
    sorter: Any = import_module(PACKAGE)
    # Bytes that are zero in every token would be sorted too, at five bytes of memory each.
    size, width = tokens.itemsize, max(1, (int(tokens.max()).bit_length() + 7) // 8)
    for first, end in parts:
        text = np.empty((end - first, width), dtype=np.uint8)
        for at in range(0, end - first, PIECE):
            piece = tokens[first + at : min(end, first + at + PIECE)].view(np.uint8)
            text[at : at + PIECE] = piece.reshape(-1, size)[:, size - width :]
        yield from _in_pieces(sorter.divsufsort(text.reshape(-1)), first, width)


def _in_pieces(order: np.ndarray, first: int, width: int) -> Iterator[np.ndarray]:
    """Yield the tokens, counted from ``first``, whose bytes stand in an order, a piece at a time.

    Big-endian bytes sort as the tokens do; suffixes within a token are left out.
    """
    for at in range(0, len(order), PIECE):
        piece = order[at : at + PIECE]
        yield first + piece[piece % width == 0].astype(np.int64) // width


def parts_of(firsts: np.ndarray, total: int) -> list[tuple[int, int]]:
    """Return where parts of whole documents begin and end: each as large as fits, or one document.

    Args:
        firsts: where each document begins, ascending from 0.
        total: tokens of all.
    """
    ends, edges = np.append(firsts[1:], total), [0]
    while edges[-1] < total:
        following, beyond = np.searchsorted(ends, [edges[-1], edges[-1] + PART], side="right")
        edges.append(int(ends[max(following, beyond - 1)]))
    return list(pairwise(edges))


def _write(path: Path, dtype: np.dtype, parts: Iterable[np.ndarray]) -> None:
    with atomic_file(path) as temporary, array_file(temporary, dtype) as append:
        for part in parts:
            append(part)


class Suffixes:
    """Where token sequences stand in the documents of a lens. Open one with :meth:`open`.

    Nothing is read before a question is asked: a search looks at about 2·log₂ n places. Positions
    are those of the corpus: global int64 token offsets. No match holds an end of text, so none goes
    beyond a document; a sequence with one in it stands nowhere.

    Attributes:
        path: the lens directory.
    """

    def __init__(self, path: Path, tokens: Blocks, order: Blocks, documents: np.ndarray) -> None:
        self.path = path
        self._tokens, self._order = tokens, order
        self._firsts, self._starts, part = documents
        edges = self._firsts[np.diff(part, prepend=-1) > 0].tolist()
        self._parts = list(pairwise([*edges, len(tokens)]))
        self._size = tokens.dtype.itemsize
        self._end_of_text = int.from_bytes(tokens.read(len(tokens) - 1, len(tokens)), "big")

    @classmethod
    def open(cls, directory: Path | str) -> Suffixes:
        """Open the suffix array of a lens directory.

        Raises:
            InputError: the lens has none; the message says how to add it.
            FormatError: a file is missing, cut off or damaged.
        """
        path = Path(directory)
        if not has_suffixes(path):
            raise InputError(
                f"the lens {path} cannot say what stands in its corpus word for word: it has no "
                f"{ORDER_FILE}. Install prismlm with its extra verbatim, pip install "
                "'prismlm[verbatim]', and build the lens again with `prismlm index`."
            )
        tokens, order, documents, sums = (np.asarray(open_array(path / name)) for name in FILES)
        _check(path / TOKENS_FILE, tokens.dtype in (">u2", ">u4") and tokens.ndim == 1)
        _check(path / ORDER_FILE, order.dtype in ("<u4", "<i8") and order.shape == tokens.shape)
        _check(path / DOCUMENTS_FILE, documents.dtype == "<i8" and documents.shape[:-1] == (3,))
        _check(path / DOCUMENTS_FILE, 0 < documents.shape[1] <= len(tokens))
        ascending = (np.diff(documents[0], prepend=-1, append=len(tokens)) > 0).all()
        _check(path / DOCUMENTS_FILE, documents[0, 0] == 0 and bool(ascending))
        _check(
            path / DOCUMENTS_FILE, documents[2, 0] == 0 and bool((np.diff(documents[2]) >= 0).all())
        )
        of_tokens = -(-tokens.nbytes // BLOCK_BYTES)
        expected = (of_tokens - (-order.nbytes // BLOCK_BYTES),)
        _check(path / CHECKSUMS_FILE, sums.dtype == "<u4" and sums.shape == expected)
        checked = (
            Blocks(path / TOKENS_FILE, tokens, sums[:of_tokens]),
            Blocks(path / ORDER_FILE, order, sums[of_tokens:]),
        )
        return cls(path, *checked, documents)

    def __len__(self) -> int:
        """How many tokens can be found: all but the ends of documents."""
        return len(self._tokens) - len(self._firsts)

    def __repr__(self) -> str:
        return f"Suffixes({str(self.path)!r}, {len(self)} tokens, {len(self._firsts)} documents)"

    def tokens(self, position: int, length: int) -> np.ndarray:
        """Return the tokens of one document from a global position on, int64 [length].

        Raises:
            FormatError: a file does not hold what was written.
        """
        document = int(np.searchsorted(self._starts, position, side="right")) - 1
        first = int(self._firsts[document] + position - self._starts[document])
        data = self._tokens.read(first, first + length)
        return np.frombuffer(data, self._tokens.dtype).astype(np.int64)

    def count(self, tokens: Tokens) -> int:
        """Return how often a sequence of one token or more stands in the documents."""
        return sum(map(len, self.rows(tokens)))

    def find(self, tokens: Tokens, limit: int) -> np.ndarray:
        """Return the first ``limit`` positions that a sequence begins at, ascending: int64 [m].

        It reads all places of the sequence, 4 or 8 bytes each.

        Raises:
            FormatError: a file does not hold what was written.
        """
        columns = [self._places(rows.start, rows.stop) for rows in self.rows(tokens)]
        found = np.concatenate(columns).astype(np.int64)
        if limit < len(found):
            found = np.partition(found, limit)[:limit]
        return self._globally(np.sort(found))

    def longest_prefix(self, tokens: Tokens) -> tuple[int, int]:
        """Return how many of the first tokens stand in the documents together, and how often.

        Where not even the first token does, 0 and 0.
        """
        look, length = FIRST_LOOK, 0
        while True:
            # Few sequences stand there for long: comparing all of a text would be slow.
            wanted = self._encode(tokens[:look])
            length = self._standing(wanted)
            if length < look or look >= len(tokens):
                return length, self.count(tokens[:length])
            look *= 2

    def rows(self, tokens: Tokens) -> list[range]:
        """Return the rows of the order, in each part, that begin with a sequence."""
        wanted = self._encode(tokens)
        size = len(wanted)
        if not size or size < len(tokens) * self._size:
            return [range(0)]
        read, found = partial(self._at_row, size), list[range]()
        every = range(len(self._order))
        for first, end in self._parts:
            low = bisect_left(every, wanted, first, end, key=read)
            found.append(range(low, bisect_right(every, wanted, low, end, key=read)))
        return found

    def _standing(self, wanted: bytes) -> int:
        """Return how many of the first tokens stand somewhere: beside the place to insert them."""
        size, dtype = len(wanted), self._tokens.dtype
        longest, sought = 0, np.frombuffer(wanted, dtype)
        for first, end in self._parts:
            rows, read = range(len(self._order)), partial(self._at_row, size)
            row = bisect_left(rows, wanted, first, end, key=read)
            for near in self._places(max(first, row - 1), min(end, row + 1)).tolist():
                found = np.frombuffer(self._read(size, near), dtype)
                differing = np.flatnonzero(found != sought[: len(found)])
                longest = max(longest, int(differing[0]) if len(differing) else len(found))
        return longest

    def _places(self, first: int, last: int) -> np.ndarray:
        return np.frombuffer(self._order.read(first, last), self._order.dtype)

    def _at_row(self, size: int, row: int) -> bytes:
        return self._read(size, int.from_bytes(self._order.read(row, row + 1), "little"))

    def _read(self, size: int, place: int) -> bytes:
        """Return up to ``size`` bytes of the tokens from a place on."""
        return self._tokens.read(place, place + size // self._size)

    def _encode(self, tokens: Tokens) -> bytes:
        """Return tokens as they are stored, up to the first that stands in no document."""
        ids, dtype = np.asarray(tokens, dtype=np.int64), self._tokens.dtype
        nowhere = (ids < 0) | (ids > np.iinfo(dtype).max) | (ids == self._end_of_text)
        return ids[: int(nowhere.argmax()) if nowhere.any() else None].astype(dtype).tobytes()

    def _globally(self, places: np.ndarray) -> np.ndarray:
        document = np.searchsorted(self._firsts, places, side="right") - 1
        return places - self._firsts[document] + self._starts[document]


def has_suffixes(directory: Path) -> bool:
    """Say whether a lens directory has a suffix array, whole or in part."""
    return any((directory / name).is_file() for name in FILES)


def _check(path: Path, fine: bool) -> None:
    if not fine:
        raise FormatError(
            f"{path} is damaged, or not of this lens. Build the lens again with `prismlm index`."
        )
