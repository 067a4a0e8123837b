"""Every token sequence of a lens's documents, found in a few dozen looks: a suffix array.

The documents of the split stand one after the other in ``suffixes-tokens.npy``, each ended by the
end-of-text token, and ``suffixes-order.npy`` lists all places of it in the order of the tokens that
follow. What begins with the same tokens stands together there, so a binary search finds it.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.errors import FormatError, InputError
from prismlm.files import atomic_file

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

TOKENS_FILE = "suffixes-tokens.npy"
ORDER_FILE = "suffixes-order.npy"
DOCUMENTS_FILE = "suffixes-documents.npy"
FILES = (TOKENS_FILE, ORDER_FILE, DOCUMENTS_FILE)
PACKAGE = "pydivsufsort"
PIECE = 2**20
# Places up to here fit 4 bytes.
LARGEST_SHORT = 2**32 - 1
FIRST_LOOK = 32

Tokens = Sequence[int] | np.ndarray


def write_suffixes(directory: Path, corpus: Corpus, split: Split) -> list[str]:
    """Write the suffix array of a split into a lens directory; the same input gives the same bytes.

    The lens then needs the corpus no more: it keeps a copy of the n tokens, 2 or 4 bytes each, the
    order of their n places, 4 bytes each (8 from 2³² tokens on), and 16 bytes a document.

    Memory: 5·w bytes a token, w being the bytes of the largest token id: 10 up to 65,536 tokens in
    the vocabulary, 15 above, and some 10 MB. Where n·w is 2³¹ or more, 9·w: 18 or 27.

    Returns:
        The names of the files written; none without the package pydivsufsort, which sorts.

    Raises:
        InputError: the split has no documents.
        FormatError: the corpus is damaged.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return []
    documents = corpus.split(split)
    if not len(documents):
        raise InputError(
            f"the corpus {corpus.name} has no documents in its {split} split: choose another split."
        )
    starts, lengths = corpus.starts[documents], corpus.lengths[documents]
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    stored = np.dtype(corpus.meta["dtype"]).newbyteorder(">")
    _write(directory / TOKENS_FILE, stored, (total,), _pieces(corpus, starts, lengths))
    tokens = np.load(directory / TOKENS_FILE, mmap_mode="r")
    places = np.dtype("<u4" if total <= LARGEST_SHORT else "<i8")
    _write(directory / ORDER_FILE, places, (total,), _sorted(tokens))
    _write(
        directory / DOCUMENTS_FILE, np.dtype("<i8"), (2, len(documents)), [ends - lengths, starts]
    )
    return list(FILES)


def _pieces(corpus: Corpus, starts: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the tokens of documents, those that stand side by side in the corpus together."""
    follows = starts[1:] != starts[:-1] + lengths[:-1]
    first = np.concatenate([[True], follows])
    last = np.concatenate([follows, [True]])
    for start, end in zip(starts[first].tolist(), (starts + lengths)[last].tolist(), strict=True):
        for at in range(start, end, PIECE):
            yield corpus.tokens(at, min(PIECE, end - at))


def _sorted(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the places of all suffixes in order, a piece at a time."""
    sorter: Any = import_module(PACKAGE)
    # Bytes that are zero in every token would be sorted too, at five bytes of memory each.
    size, width = tokens.itemsize, max(1, (int(tokens.max()).bit_length() + 7) // 8)
    text = np.empty((len(tokens), width), dtype=np.uint8)
    for at in range(0, len(tokens), PIECE):
        piece = tokens[at : at + PIECE].view(np.uint8).reshape(-1, size)
        text[at : at + PIECE] = piece[:, size - width :]
    order = sorter.divsufsort(text.reshape(-1))
    del text
    for at in range(0, len(order), PIECE):
        piece = order[at : at + PIECE]
        # Big-endian bytes sort as the tokens do; suffixes that begin within a token are left out.
        yield piece[piece % width == 0] // width


def _write(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], parts: Iterable[np.ndarray]
) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    # Written, not memory-mapped: a full disk is then an error and not the end of the process.
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype=dtype).data)


class Suffixes:
    """Where token sequences stand in the documents of a lens. Open one with :meth:`open`.

    Nothing is read before a question is asked: a search looks at about 2·log₂ n places. Positions
    are those of the corpus: global int64 token offsets. No match holds an end of text, so none goes
    beyond a document; a sequence with one in it stands nowhere.

    Attributes:
        path: the lens directory.
    """

    def __init__(
        self, path: Path, tokens: np.ndarray, order: np.ndarray, documents: np.ndarray
    ) -> None:
        self.path = path
        self._tokens, self._order = tokens, order
        self._firsts, self._starts = documents
        self._bytes, self._size = tokens.view(np.uint8).data, tokens.itemsize
        self._end_of_text = int(tokens[-1])

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
        tokens, order, documents = (_map(path / name) for name in FILES)
        _check(path / TOKENS_FILE, tokens.dtype in (">u2", ">u4") and tokens.ndim == 1)
        _check(path / ORDER_FILE, order.dtype in ("<u4", "<i8") and order.shape == tokens.shape)
        _check(path / DOCUMENTS_FILE, documents.dtype == "<i8" and documents.shape[:-1] == (2,))
        _check(path / DOCUMENTS_FILE, 0 < documents.shape[1] <= len(tokens))
        return cls(path, tokens, order, documents)

    def __len__(self) -> int:
        """How many tokens can be found: all but the ends of documents."""
        return len(self._tokens) - len(self._firsts)

    def __repr__(self) -> str:
        return f"Suffixes({str(self.path)!r}, {len(self)} tokens, {len(self._firsts)} documents)"

    def count(self, tokens: Tokens) -> int:
        """Return how often a sequence of one token or more stands in the documents."""
        return len(self.rows(tokens))

    def find(self, tokens: Tokens, limit: int) -> np.ndarray:
        """Return the first ``limit`` positions that a sequence begins at, ascending: int64 [m].

        It reads all places of the sequence, 4 or 8 bytes each.

        Raises:
            FormatError: the files do not belong together, or are damaged.
        """
        rows = self.rows(tokens)
        found = self._order[rows.start : rows.stop].astype(np.int64)
        if limit < len(found):
            found = np.partition(found, limit)[:limit]
        wanted = self._encode(tokens)
        for place in found.tolist():
            _check(self.path / ORDER_FILE, self._read(len(wanted), place) == wanted)
        return self._globally(np.sort(found))

    def longest_prefix(self, tokens: Tokens) -> tuple[int, range]:
        """Return how many of the first tokens stand in the documents together, and their rows.

        The rows are those of the order; their number is how often the prefix stands there. Where
        not even the first token does, 0 and no rows.
        """
        look, length = FIRST_LOOK, 0
        while True:
            # Few sequences stand there for long: comparing all of a text would be slow.
            wanted = self._encode(tokens[:look])
            length = self._standing(wanted)
            if length < look or look >= len(tokens):
                return length, self.rows(tokens[:length])
            look *= 2

    def rows(self, tokens: Tokens) -> range:
        """Return the rows of the order that begin with a sequence; none for the empty one."""
        wanted = self._encode(tokens)
        size = len(wanted)
        if not size or size < len(tokens) * self._size:
            return range(0)
        low = bisect_left(self._order, wanted, key=partial(self._read, size))
        high = bisect_right(self._order, wanted, lo=low, key=partial(self._read, size))
        return range(low, high)

    def around(self, position: int, length: int, margin: int) -> tuple[list[int], list[int]]:
        """Return up to ``margin`` tokens of the document before a place and as many after it.

        Args:
            position: where the place begins, as :meth:`find` returns it.
            length: its tokens.
            margin: the most tokens on either side; an end of text is none of them.

        Raises:
            InputError: the place is not within one document of the lens.
        """
        document = int(np.searchsorted(self._starts, position, side="right")) - 1
        first, end = [*self._firsts[max(0, document) :][:2].tolist(), len(self._tokens)][:2]
        at = position - int(self._starts[document]) + first
        if document < 0 or length < 0 or at + length > end - 1:
            raise InputError(
                f"tokens {position} to {position + length} do not lie within one document of the "
                f"lens {self.path}."
            )
        before = self._tokens[max(first, at - margin) : at]
        after = self._tokens[at + length : min(end - 1, at + length + margin)]
        return before.tolist(), after.tolist()

    def _standing(self, wanted: bytes) -> int:
        """Return how many of the first tokens stand somewhere: beside the place to insert them."""
        size, dtype = len(wanted), self._tokens.dtype
        row = bisect_left(self._order, wanted, key=partial(self._read, size))
        longest, sought = 0, np.frombuffer(wanted, dtype)
        for near in self._order[max(0, row - 1) : row + 1].tolist():
            found = np.frombuffer(self._read(size, near), dtype)
            differing = np.flatnonzero(found != sought[: len(found)])
            longest = max(longest, int(differing[0]) if len(differing) else len(found))
        return longest

    def _read(self, size: int, place: int) -> bytes:
        """Return up to ``size`` bytes of the tokens from a place on."""
        start = int(place) * self._size
        # Asked before the check, which joins a path: this is called some sixty times a search.
        if not 0 <= start < len(self._bytes):
            _check(self.path / ORDER_FILE, False)
        return self._bytes[start : start + size].tobytes()

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


def _map(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except Exception as error:  # numpy raises half a dozen unrelated types here
        raise FormatError(
            f"{path} cannot be read ({error}). Build the lens again with `prismlm index`."
        ) from error


def _check(path: Path, fine: bool) -> None:
    if not fine:
        raise FormatError(
            f"{path} is damaged, or not of this lens. Build the lens again with `prismlm index`."
        )
