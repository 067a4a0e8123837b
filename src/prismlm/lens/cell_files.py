"""How the cells of a lens are written: from sorted runs of positions, merged a few at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from prismlm.corpus.layout import DOCUMENT_SCHEMA
from prismlm.lens import layout
from prismlm.lens.cells import CellsMeta, record_type
from prismlm.lens.codes import SAMPLE, CodeName, Int8Codes, ProductCodes
from prismlm.progress import Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

# Records that are sorted in memory, at least one cell.
SORT_BYTES = 2**25
DOCUMENTS_AT_ONCE = 2**12


def spooled_type(width: int) -> np.dtype:
    """Return the record of a position before it is in a cell, the nearest prototype's."""
    return np.dtype([("cell", "<i4"), ("token", "<i4"), *record_type(Int8Codes(width)).descr])


def drawn(positions: np.ndarray, share: float) -> np.ndarray:
    """Return which global positions belong to a sample, by their SplitMix64 hash: bool [N]."""
    if share == 1:
        return np.ones(len(positions), dtype=bool)
    x = positions.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) < np.uint64(int(share * 2**63) * 2)


class Spool:
    """The records of one part of the corpus, in one file of runs.

    Each run is sorted by cell, then next token, then position.
    """

    def __init__(self, path: Path, width: int, runs: Sequence[int] = ()) -> None:
        self.path, self.dtype, self.runs = path, spooled_type(width), list(runs)
        self._pending: list[np.ndarray] = []

    def add(self, records: np.ndarray) -> None:
        """Add records; many are written as a run."""
        self._pending.append(records)
        if sum(part.nbytes for part in self._pending) >= SORT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write pending records as one run."""
        records, self._pending = _sorted(self._pending, self.dtype), []
        if len(records):
            with self.path.open("ab") as file:
                file.write(records.view(np.uint8).data)
            self.runs.append(len(records))

    def opened(self) -> list[np.ndarray]:
        """Return the records of every run, memory-mapped."""
        if not self.runs:
            return []
        records = np.memmap(self.path, self.dtype, "r", shape=(sum(self.runs),))
        return np.split(records, np.cumsum(self.runs)[:-1])


def _sorted(parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    records = np.concatenate([np.empty(0, dtype), *parts])
    return records[np.lexsort([records[name] for name in ("position", "token", "cell")])]


def write_cells(
    directory: Path,
    spools: Sequence[Spool],
    num_cells: int,
    vocabulary: int,
    share: float,
    progress: Reporter,
    *,
    codes: CodeName = "int8",
    tokens: int = 2**63,
) -> dict[str, Any]:
    """Merge the runs of all parts into the files of cells; return the record for ``meta.json``.

    The result does not depend on the runs. ``share`` of the positions were kept; ``tokens`` of the
    corpus determine the bytes of a position.
    """
    runs, dtype = [run for spool in spools for run in spool.opened()], spools[0].dtype
    counts = np.zeros(num_cells, np.int64)
    for run in runs:
        counts += np.bincount(run["cell"], minlength=num_cells)
    width, rows = dtype["code"].shape[0], int(counts.sum())
    coder: Int8Codes | ProductCodes = Int8Codes(width)
    if codes != "int8":
        coder = ProductCodes.learn(_sample(runs, dtype, rows, share), codes)
        np.save(directory / layout.CELL_CENTRES_FILE, coder.centres)
    sizes = 4 if tokens <= 2**32 else 8, 2 if vocabulary <= 2**16 else 4
    types = record_type(coder, *sizes), np.dtype("<i8"), np.dtype("<i8")
    written = 0
    with ExitStack() as files, progress.task("Sorting positions", rows, "positions") as task:
        append, append_keys, append_starts = (
            files.enter_context(layout.array_file(directory / name, kind))
            for name, kind in zip(layout.CELL_FILES, types, strict=True)
        )
        for ends in _cell_ranges(counts, max(1, SORT_BYTES // dtype.itemsize)):
            parts = [run[slice(*(bisect_left(run["cell"], i) for i in ends))] for run in runs]
            records = _sorted(parts, dtype)
            stored = np.empty(len(records), types[0])
            for name in ("position", "read", "probability"):
                stored[name] = records[name]
            coder.put(records, stored)
            key = records["cell"].astype(np.int64) * vocabulary + records["token"]
            keys, starts = np.unique(key, return_index=True)
            append(stored)
            append_keys(keys)
            append_starts(starts + written)
            written += len(records)
            task.advance(len(records))
    return asdict(CellsMeta(codes, share, rows, vocabulary, width, *sizes))


def _sample(runs: list[np.ndarray], dtype: np.dtype, rows: int, share: float) -> np.ndarray:
    """Return states of some 65,536 positions in order, [n, d]."""
    # The positions that were kept have the lowest hashes already.
    share *= min(1.0, SAMPLE / max(1, rows))
    parts = [run[drawn(run["position"], share)] for run in runs]
    sample = np.concatenate([np.empty(0, dtype), *parts])
    width = dtype["code"].shape[0]
    if not len(sample):
        return np.zeros((1, width), "f4")
    return Int8Codes(width).states(sample[np.argsort(sample["position"])]).numpy()


def _cell_ranges(counts: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of successive cells with at most ``most`` records, or of one cell."""
    ends, first = np.append(0, np.cumsum(counts)), 0
    while first < len(counts):
        last = int(np.searchsorted(ends, ends[first] + most, side="right")) - 1
        last = max(first + 1, last)
        yield first, last
        first = last


def write_documents(directory: Path, corpus: Corpus, split: Split) -> None:
    """Write ``cell-documents.parquet``: the documents of the split, in the order of the corpus."""
    numbers, path = corpus.split(split), directory / layout.CELL_DOCUMENTS_FILE
    options: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
    with pq.ParquetWriter(path, DOCUMENT_SCHEMA, **options) as writer:
        for first in range(0, len(numbers), DOCUMENTS_AT_ONCE):
            table = corpus.documents.take(numbers[first : first + DOCUMENTS_AT_ONCE])
            writer.write_table(table.select(DOCUMENT_SCHEMA.names))
