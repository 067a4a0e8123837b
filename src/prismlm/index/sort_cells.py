"""Writing cells: the sorted runs of all shards become one file, a stretch of cells at a time."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from prismlm.corpus.layout import DOCUMENT_SCHEMA
from prismlm.index import cells, layout
from prismlm.index.codes import SAMPLE, CodeName, Codes, Int8Codes, ProductCodes
from prismlm.index.positions import drawn
from prismlm.index.spool import Spool, in_order
from prismlm.progress import Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

SORT_BYTES = 2**25
# What sorting takes of it: records as they are read, sorted and written, and beside each of them
# its place in the order and what it is ordered by.
COPIES = 3
BESIDE = 32
DOCUMENTS_AT_ONCE = 2**12


def write_cells(
    directory: Path,
    spools: Sequence[Spool],
    num_cells: int,
    vocabulary: int,
    share: float,
    progress: Reporter,
    memory: int = SORT_BYTES,
    *,
    codes: CodeName = "int8",
    tokens: int = 2**63,
) -> dict[str, Any]:
    """Merge the runs of all shards into ``cells.npy`` and the files of its ranges.

    Stretches of cells as large as memory allows, and parts of a cell that is larger, are read from
    every run, which are sorted, and written one after another. Every record is read twice, the
    first time to compare checksums. The order is a total one, so how the records came to their
    runs changes no byte.

    Args:
        directory: of the lens that is being written.
        spools: of all shards.
        num_cells: K.
        vocabulary: V, what keys are counted in.
        share: of positions that were kept.
        progress: shows positions done.
        memory: bytes that sorting may take; two records' at least.
        codes: of hidden states. Centres of pq are learned from a sample of the positions, for
            which every record is read once more.
        tokens: of the whole corpus, which no position is above.

    Returns:
        What ``meta.json`` says of them.

    Raises:
        FormatError: a spool does not hold what was written.
        OSError: the disk is full or failing.
        InputError: ``codes`` needs faiss, which is not installed.
    """
    counts = [spool.counts(num_cells) for spool in spools]
    total = np.sum([rows.sum(0) for rows in counts], axis=0)
    size, rows = spools[0].dtype.itemsize, int(total.sum())
    width = spools[0].dtype["code"].shape[0]
    sizes = 4 if tokens <= 2**32 else 8, 2 if vocabulary <= 2**16 else 4
    coded = _coded(spools, codes, share)
    of_codes = coded.write(directory)
    with (
        _Files(directory, cells.column_types(coded, *sizes), vocabulary) as files,
        progress.task("Sorting positions", rows, "positions") as task,
    ):
        most = max(1, memory // (COPIES * size + BESIDE))
        for part in _parts(spools, counts, total, most):
            records = in_order(_read(part, spools[0].dtype))
            files.append(records, coded)
            task.advance(len(records))
            # Else it would be there still while the next is sorted.
            del records
    checksums = files.checksums + of_codes
    return asdict(cells.CellsMeta(codes, share, rows, vocabulary, width, checksums, *sizes))


class _Files:
    """The files of cells, which grow by sorted records; ``checksums`` are those of the ranges."""

    def __init__(self, directory: Path, types: Sequence[np.dtype], vocabulary: int) -> None:
        self._stack, self._waiting = ExitStack(), b""
        self._types, self._vocabulary, self._rows, self._last = types, vocabulary, 0, -1
        self._paths = [directory / name for name in layout.CELL_FILES]
        self.checksums = [0, 0]

    def __enter__(self) -> _Files:
        columns = zip(self._paths, self._types, strict=True)
        self._columns = [self._stack.enter_context(array_file(*column)) for column in columns]
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            if error[0] is None:
                rest = [zlib.crc32(self._waiting)] if self._waiting else []
                self._columns[-1](np.array(rest, dtype=np.uint32))

    def append(self, records: np.ndarray, codes: Codes) -> None:
        """Write records that follow those before, with states in other codes."""
        kept = np.empty(len(records), self._types[0])
        for name in ("position", "read", "probability"):
            kept[name] = records[name]
        codes.put(records, kept)
        every = records["cell"].astype(np.int64) * self._vocabulary + records["token"]
        begins = np.flatnonzero(np.diff(every, prepend=self._last))
        keys, self._last = every[begins], int(every[-1]) if len(every) else self._last
        begins += self._rows
        self.checksums = [
            zlib.crc32(p.data, c) for p, c in zip((keys, begins), self.checksums, strict=True)
        ]
        parts = (kept, keys, begins, self._sums(kept))
        for append, part in zip(self._columns, parts, strict=True):
            append(part)
        self._rows += len(records)

    def _sums(self, records: np.ndarray) -> np.ndarray:
        """Return the CRC-32 of every 64 records, those that waited for these among them: uint32."""
        data, sums, begin = records.view(np.uint8).data, list[int](), 0
        size = cells.BLOCK_ROWS * records.dtype.itemsize
        for end in range(size - len(self._waiting), len(data) + 1, size):
            sums.append(zlib.crc32(data[begin:end], zlib.crc32(self._waiting)))
            self._waiting, begin = b"", end
        self._waiting += bytes(data[begin:])
        return np.array(sums, dtype=np.uint32)


def _coded(spools: Sequence[Spool], codes: CodeName, share: float) -> Codes:
    if codes != "int8":
        rows = sum(spool.rows for spool in spools)
        return ProductCodes.learn(_sample(spools, rows, share), codes)
    return Int8Codes(spools[0].dtype["code"].shape[0])


def _sample(spools: Sequence[Spool], rows: int, share: float) -> np.ndarray:
    """Return states of some 65,536 positions, whatever run they are in, in order: [n, d]."""
    # Those that were kept have the lowest hashes already.
    share *= min(1.0, SAMPLE / max(1, rows))
    found = [
        records[drawn(records["position"], share)]
        for spool in spools
        for records in spool.parts(0, spool.rows)
    ]
    sample = np.concatenate([np.empty(0, spools[0].dtype), *found])
    sample = sample[np.argsort(sample["position"])]
    width = sample.dtype["code"].shape[0]
    return Int8Codes(width).states(sample).numpy() if len(sample) else np.zeros((1, width), "f4")


def stretches(counts: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of successive cells that hold at most ``most`` records, or are one."""
    first, held = 0, 0
    for cell, count in enumerate(counts.tolist()):
        if held and held + count > most:
            yield first, cell
            first, held = cell, 0
        held += count
    if first < len(counts):
        yield first, len(counts)


class Range(NamedTuple):
    """Records of one run that follow each other, by their places in the file."""

    spool: Spool
    begin: int
    end: int


def _parts(
    spools: Sequence[Spool], counts: Sequence[np.ndarray], total: np.ndarray, most: int
) -> Iterator[list[Range]]:
    """Yield what is sorted together, in order: ranges of all runs, ``most`` records in all."""
    for first, last in stretches(total, most):
        ranges: list[Range] = []
        for spool, of_runs in zip(spools, counts, strict=True):
            start = 0
            for run, of_cells in zip(spool.runs, of_runs, strict=True):
                begin, end = int(of_cells[:first].sum()), int(of_cells[:last].sum())
                ranges.append(Range(spool, start + begin, start + end))
                start += run.rows
        yield from cut(ranges, most)


def cut(ranges: list[Range], most: int) -> Iterator[list[Range]]:
    """Yield parts of sorted ranges, in order, that hold at most ``most`` records, or two.

    Every step-th record of each of R ranges is looked at. k of these stand for k·step records, and
    a part has at most R·(step − 1) beside that no look has met: step and k make each a half.
    """
    ranges = [one for one in ranges if one.end > one.begin]
    edges: list[tuple[int, ...]] = []
    if sum(end - begin for _, begin, end in ranges) > most:
        step = max(1, most // (2 * len(ranges)))
        half = max(1, most // (2 * step))
        looks = [spool.key(at) for spool, begin, end in ranges for at in range(begin, end, step)]
        edges = sorted(looks)[half::half]
    for edge in edges:
        ends = [bisect_right(range(one.end), edge, one.begin, key=one.spool.key) for one in ranges]
        yield [one._replace(end=end) for one, end in zip(ranges, ends, strict=True)]
        ranges = [one._replace(begin=end) for one, end in zip(ranges, ends, strict=True)]
    yield ranges


def _read(ranges: Sequence[Range], dtype: np.dtype) -> np.ndarray:
    """Return the records of some ranges."""
    found, held = np.empty(sum(end - begin for _, begin, end in ranges), dtype), 0
    for spool, begin, end in ranges:
        held += len(spool.read(begin, end - begin, found[held:]))
    return found


def write_documents(directory: Path, corpus: Corpus, split: Split) -> None:
    """Write ``cell-documents.parquet``: every document of the split, in the order of the corpus."""
    numbers = corpus.split(split)
    path = directory / layout.CELL_DOCUMENTS_FILE
    with pq.ParquetWriter(
        path, DOCUMENT_SCHEMA, compression="zstd", write_page_checksum=True
    ) as writer:
        for first in range(0, len(numbers), DOCUMENTS_AT_ONCE):
            table = corpus.documents.take(numbers[first : first + DOCUMENTS_AT_ONCE])
            writer.write_table(table.select(DOCUMENT_SCHEMA.names))


@contextmanager
def array_file(path: Path, dtype: np.dtype) -> Iterator[Callable[[np.ndarray], None]]:
    """Yield what adds parts to a file of one array [n]; its header is written again at the end.

    It is written, not memory-mapped: a full disk is then an error and not the end of the process.
    """
    rows = 0

    def header() -> None:
        described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, described | {"shape": (rows,)})

    def append(part: np.ndarray) -> None:
        nonlocal rows
        file.write(np.ascontiguousarray(part, dtype).view(np.uint8).data)
        rows += len(part)

    with path.open("wb") as file:
        header()
        yield append
        # A header leaves room for as many digits as a length can have.
        file.seek(0)
        header()
