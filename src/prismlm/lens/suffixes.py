"""The tokens of a lens's documents, and suffix arrays that find sequences by binary search.

``suffixes-tokens.npy`` has the documents of the split one after the other, each ending in the
end-of-text token, and ``suffixes-order.npy`` the indices of all its suffixes, sorted. Parts of
whole documents with some 2 million tokens are sorted separately, so that memory does not grow with
the corpus, and each part is searched.

A text of more than ``LARGE`` tokens would have too many parts. It has larger ones, with two files
each, ``suffixes-tokens-00000.npy`` and ``suffixes-order-00000.npy``, whose indices are their own.
infini-gram sorts them on disk.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import mmap
import subprocess
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prismlm.errors import PrismError
from prismlm.lens.cell_files import grouped
from prismlm.lens.layout import array_file, map_file, numbered
from prismlm.lens.store import LensFiles, files_of

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

TOKENS_FILE, ORDER_FILE = "suffixes-tokens.npy", "suffixes-order.npy"
DOCUMENTS_FILE = "suffixes-documents.npy"
FILES = (TOKENS_FILE, ORDER_FILE, DOCUMENTS_FILE)
# Tokens that are sorted together in memory, unless a single document has more.
PART = 2**21
# Tokens of a text whose look-ups take some 5 ms (docs/results/verbatim.md). Larger ones are sorted
# on disk, in parts of as many tokens, but in no more than MAX_PARTS unless a part would be larger
# than MAX_PART_BYTES, which are in memory while it is sorted.
LARGE = 2**28
MAX_PARTS, MAX_PART_BYTES = 64, 3 * 2**30
PACKAGE = "pydivsufsort"
# Tokens that infini-gram sorts at a time, and bytes of the next piece that a piece is sorted with.
# Suffixes that have more in common are in any order, so of sequences as long as this that are
# repeated, some occurrences may not be found.
PIECE, OVERLAP = 2**25, 100_000
TOKENS_AT_ONCE = 2**22
# Of infini-gram's byte offsets, and of the indices that are stored.
INDEX = np.dtype("<u4")

Tokens = Sequence[int] | np.ndarray


def divided(corpus: Corpus, split: Split) -> tuple[np.ndarray, bool]:
    """Return the first document of each part of a split, with the end; and whether it is large."""
    lengths = corpus.lengths[corpus.split(split)]
    total = int(lengths.sum())
    if total <= LARGE:
        return np.array([0, *(last for _, last in grouped(lengths, PART))]), False
    needed = total * np.dtype(corpus.meta["dtype"]).itemsize / MAX_PART_BYTES
    count = math.ceil(max(min(total / LARGE, MAX_PARTS), needed))
    bounds = [total * part // count for part in range(count + 1)]
    return np.unique(np.searchsorted(np.cumsum(lengths), bounds, side="right")), True


def count_parts(corpus: Corpus, split: Split) -> int:
    """Return how many parts :func:`write_part` writes, which depends on the corpus alone."""
    firsts, large = divided(corpus, split)
    return len(firsts) - 1 if large else 1


def write_part(directory: Path, corpus: Corpus, split: Split, number: int) -> None:
    """Write one of :func:`count_parts` parts; its order if a sorter is installed.

    Other processes may write others meanwhile. Sorting takes 5·w bytes of memory for each token of
    a part, with w bytes in the largest token id; that of a large text takes what
    :func:`sort_on_disk` says.
    """
    firsts, large = divided(corpus, split)
    documents = corpus.split(split)[slice(*firsts[number : number + 2]) if large else slice(None)]
    names = (numbered(name, number if large else None) for name in (TOKENS_FILE, ORDER_FILE))
    path, order_path = (directory / name for name in names)
    starts, lengths = corpus.starts[documents].tolist(), corpus.lengths[documents].tolist()
    stored = np.dtype(corpus.meta["dtype"]).newbyteorder(">")
    with array_file(path, stored) as append:
        for span in zip(starts, lengths, strict=True):
            append(corpus.tokens(*span))
    if large:
        sort_on_disk(path, order_path)
    if large or importlib.util.find_spec(PACKAGE) is None:
        return
    sorter: Any = import_module(PACKAGE)
    tokens = np.load(path, mmap_mode="r")
    # Big-endian bytes sort as the tokens do. Leading ones that are zero in all are left out.
    width = max(1, (int(tokens.max()).bit_length() + 7) // 8)
    edges = np.cumsum([0, *lengths])[firsts].tolist()
    with array_file(order_path, INDEX) as append:
        for first, end in pairwise(edges):
            text = tokens[first:end].view(np.uint8).reshape(-1, tokens.itemsize)[:, -width:]
            order = sorter.divsufsort(np.array(text, order="C").reshape(-1))
            # Without suffixes that start within a token.
            append(order[order % width == 0].astype(np.int64) // width + first)


def sort_on_disk(tokens: Path, order: Path) -> None:
    """Write the indices of the sorted suffixes of an array of tokens; nothing without infini-gram.

    infini-gram (https://infini-gram.io, Apache-2.0) sorts pieces of a text in memory, some 30 bytes
    a token, and merges their orders from disk, with the tokens in memory. On disk it takes 8 bytes
    a token, of which 4 remain. Its program is called directly, because its Python interface makes
    tokens itself and pastes paths into shell commands.
    """
    spec = importlib.util.find_spec("infini_gram")
    if spec is None or spec.origin is None:
        return
    stored = np.load(tokens, mmap_mode="r")
    with TemporaryDirectory(prefix=".sort-", dir=order.parent) as work:
        offsets = _sort(Path(spec.origin).with_name("rust_indexing"), tokens, stored, Path(work))
        if len(offsets) != len(stored):
            raise _failure(order.parent, "its output is incomplete")
        with array_file(order, INDEX) as append:
            for begin in range(0, len(offsets), TOKENS_AT_ONCE):
                append(offsets[begin : begin + TOKENS_AT_ONCE] // stored.itemsize)


def _sort(program: Path, tokens: Path, stored: np.memmap, work: Path) -> np.ndarray:
    """Return the byte offsets of the sorted suffixes, memory-mapped."""
    begin, step = stored.offset, PIECE * stored.itemsize
    end = begin + stored.nbytes
    common = ["--ratio", INDEX.itemsize, "--token-width", stored.itemsize]
    common += ["--data-file", tokens.resolve(), "--parts-dir", "pieces"]
    (work / "pieces").mkdir()
    # The last piece is longer than the overlap, so that the one before has all of that.
    starts = range(begin, max(begin + 1, end - OVERLAP), step)
    for start in starts:
        stop = min(start + step + OVERLAP, end)
        _run([program, "make-part", *common, "--start-byte", start, "--end-byte", stop], work)
    output = work / "pieces" / f"{begin}-{end}"
    if len(starts) > 1:
        output = work / "merged" / "0000"
        output.parent.mkdir()
        how = ["--merged-dir", "merged", "--hacksize", OVERLAP, "--num-threads", 1]
        _run([program, "merge", *common, *how], work)
        for piece in (work / "pieces").iterdir():
            piece.unlink()
    return map_file(output, INDEX) if output.is_file() else np.empty(0)


def _run(command: list[object], work: Path) -> None:
    text = list(map(str, command))
    run = subprocess.run(text, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    # Its threads may fail, and it ends with status 0.
    if run.returncode or b"panicked" in run.stderr:
        why = run.stderr.decode(errors="replace").strip() or f"exit status {run.returncode}"
        raise _failure(work.parent, why)


def _failure(directory: Path, why: str) -> PrismError:
    return PrismError(
        f"infini-gram could not sort tokens in {directory} ({why}). It needs memory for the "
        f"tokens, {30 * PIECE / 1e9:.1f} GB at least, and 8 bytes of disk for each: make room, and "
        "give the same command again."
    )


def finish(directory: Path, corpus: Corpus, split: Split) -> None:
    """Write the table of documents of all parts: first token in the lens and corpus, and part."""
    (firsts, _), documents = divided(corpus, split), corpus.split(split)
    part = np.repeat(np.arange(len(firsts) - 1), np.diff(firsts))
    lengths = corpus.lengths[documents]
    table = np.array([np.cumsum(lengths) - lengths, corpus.starts[documents], part], "<i8")
    np.save(directory / DOCUMENTS_FILE, table)


def unsearchable(names: Collection[str]) -> str | None:
    """Return why a lens with these files cannot find text word for word; None if it can."""
    stems = (name.removesuffix(".npy") for name in (TOKENS_FILE, ORDER_FILE))
    tokens, orders = (sum(name.startswith(stem) for name in names) for stem in stems)
    if tokens and tokens != orders:
        return (
            "its text was not sorted. Run `pip install 'prismlm[verbatim]'`, or with more than "
            "268 million tokens 'prismlm[infini-gram]', and build it again with `prismlm index`"
        )
    return None if tokens else "it was built with --no-text"


class _Part(NamedTuple):
    """Texts whose suffixes are sorted together: ``begin`` to ``end`` of tokens and their order."""

    tokens: np.ndarray
    order: np.ndarray
    begin: int
    end: int
    first: int  # the index of ``tokens[0]`` among all tokens of the lens

    def rows(self, query: np.ndarray) -> range:
        """Return the rows whose suffixes start with a query; an empty range where it would be.

        Big-endian bytes sort as the tokens do.
        """
        wanted, rows = query.tobytes(), range(len(self.order))

        def read(row: int) -> bytes:
            index = int(self.order[row])
            return self.tokens[index : index + len(query)].tobytes()

        low = bisect_left(rows, wanted, self.begin, self.end, key=read)
        if low == self.end or read(low) != wanted:
            return range(low, low)
        return range(low, bisect_right(rows, wanted, low, self.end, key=read))


class Suffixes:
    """The tokens of the documents of a lens, and the places of sequences in them.

    Positions are those of the corpus. A search compares about log₂ n suffixes of each part, or
    twice as many if it occurs. No match contains an end of text, so that none crosses documents.
    """

    def __init__(self, files: Path | LensFiles) -> None:
        self._files = files_of(files)
        (documents,) = self._files.arrays(DOCUMENTS_FILE)
        self._firsts, self._starts, self._part = documents
        self._texts = self._arrays(TOKENS_FILE)
        self._edges = [0, *np.cumsum([len(text) for text in self._texts]).tolist()]

    def _arrays(self, name: str) -> list[Any]:
        single = self._files.has(TOKENS_FILE)
        numbers = [None] if single else range(int(self._part[-1]) + 1)
        arrays = self._files.arrays(*(numbered(name, number) for number in numbers))
        for array in arrays:
            if isinstance(array, np.ndarray):
                # Otherwise the kernel reads megabytes around each place.
                before = array.ctypes.data % mmap.PAGESIZE
                page = ctypes.c_void_p(array.ctypes.data - before)
                size = ctypes.c_size_t(array.nbytes + before)
                ctypes.CDLL(None).madvise(page, size, mmap.MADV_RANDOM)
        return arrays

    @cached_property
    def _parts(self) -> list[_Part]:
        # A search takes many steps, one after another, so that arrays of a store are read whole.
        texts, orders = (
            [array if isinstance(array, np.ndarray) else array[:] for array in arrays]
            for arrays in (self._texts, self._arrays(ORDER_FILE))
        )
        numbers, parts = np.arange(int(self._part[-1]) + 1), list[_Part]()
        firsts = self._firsts[np.searchsorted(self._part, numbers)].tolist()
        for begin, end in pairwise([*firsts, self._edges[-1]]):
            file = bisect_right(self._edges, begin) - 1
            edge = self._edges[file]
            parts.append(_Part(texts[file], orders[file], begin - edge, end - edge, edge))
        return parts

    def __len__(self) -> int:
        """The number of tokens, without the ends of documents."""
        return self._edges[-1] - len(self._firsts)

    def tokens(self, position: int, length: int) -> np.ndarray:
        """Return the tokens of one document from a global position on, int64 [length]."""
        document = int(np.searchsorted(self._starts, position, side="right")) - 1
        first = int(self._firsts[document] + position - self._starts[document])
        text = bisect_right(self._edges, first) - 1
        first -= self._edges[text]
        return self._texts[text][first : first + length].astype(np.int64)

    def count(self, tokens: Tokens) -> int:
        """Return how often a sequence of one token or more occurs."""
        query = self._encode(tokens)
        return sum(map(len, self._rows(query))) if len(query) == len(tokens) else 0

    def find(self, tokens: Tokens, limit: int) -> np.ndarray:
        """Return the first ``limit`` positions where a sequence starts, ascending: int64 [m]."""
        query = self._encode(tokens)
        rows = self._rows(query) if len(query) == len(tokens) else []
        matches = list[np.ndarray]()
        for part, matching in zip(self._parts, rows, strict=False):
            found = part.order[matching.start : matching.stop]
            # Of a common span there are millions, which need no order.
            found = np.partition(found, limit)[:limit] if len(found) > limit else found
            matches.append(np.sort(found).astype(np.int64) + part.first)
        starts = np.concatenate([np.empty(0, np.int64), *matches])[:limit]
        document = np.searchsorted(self._firsts, starts, side="right") - 1
        return starts - self._firsts[document] + self._starts[document]

    def longest_prefix(self, tokens: Tokens) -> tuple[int, int]:
        """Return the length of the longest prefix of a sequence that occurs, and how often."""
        query = self._encode(tokens)
        length, rows = len(query), self._rows(query)
        if not any(rows):
            length = 0
            # The suffixes next to where it would be have the longest prefix.
            for part, row in zip(self._parts, rows, strict=False):
                near = slice(max(part.begin, row.start - 1), min(part.end, row.start + 1))
                for index in part.order[near].tolist():
                    suffix = part.tokens[index : index + len(query)]
                    differing = np.flatnonzero(suffix != query[: len(suffix)])
                    length = max(length, int(differing[0]) if len(differing) else len(suffix))
            rows = self._rows(query[:length])
        return length, sum(map(len, rows))

    def _rows(self, query: np.ndarray) -> list[range]:
        """Return the rows of each part; none for an empty query."""
        return [part.rows(query) for part in self._parts] if len(query) else []

    def _encode(self, tokens: Tokens) -> np.ndarray:
        """Return tokens in the stored type, up to the first that cannot occur."""
        ids, stored = np.asarray(tokens, dtype=np.int64), self._parts[0].tokens
        impossible = (ids < 0) | (ids > np.iinfo(stored.dtype).max) | (ids == stored[-1])
        return ids[: int(impossible.argmax()) if impossible.any() else None].astype(stored.dtype)
