"""Writing cells: positions wait in sorted runs on disk, which are merged a few cells at a time."""

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
from prismlm.lens import cells, layout
from prismlm.lens.codes import SAMPLE, CodeName, Codes, Int8Codes, ProductCodes
from prismlm.progress import Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

# Records that are sorted together, for a run and where runs are merged; a cell at least.
SORT_BYTES = 2**25
DOCUMENTS_AT_ONCE = 2**12


def record_type(width: int) -> np.dtype:
    """Return the record of a position while a lens is made, to be sorted by its first three fields.

    ``cell`` is the nearest prototype, ``token`` the next token; the rest is as in the cells.
    """
    stored = cells.record_type(Int8Codes(width)).descr
    return np.dtype([("cell", "<i4"), ("token", "<i4"), *stored])


def hashed(numbers: np.ndarray) -> np.ndarray:
    """Return a well-mixed hash of integers (the finaliser of SplitMix64): uint64."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def drawn(positions: np.ndarray, share: float) -> np.ndarray:
    """Return which global positions a share keeps, the same in every run: bool [N]."""
    if share == 1:
        return np.ones(len(positions), dtype=bool)
    return hashed(positions) < np.uint64(int(share * 2**63) * 2)


def in_order(parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Return the records of some parts sorted by cell, then next token, then position."""
    records = np.concatenate([np.empty(0, dtype), *parts])
    return records[np.lexsort([records[name] for name in ("position", "token", "cell")])]


class Spool:
    """The records of one part of the corpus, in one file of sorted runs."""

    def __init__(self, path: Path, width: int, runs: Sequence[int] = ()) -> None:
        self.path, self.dtype, self.runs = path, record_type(width), list(runs)
        self._waiting: list[np.ndarray] = []

    def add(self, records: np.ndarray) -> None:
        """Take records; they are written as a run when there are many."""
        self._waiting.append(records)
        if sum(part.nbytes for part in self._waiting) >= SORT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits as one run."""
        waiting = in_order(self._waiting, self.dtype)
        self._waiting = []
        if len(waiting):
            with self.path.open("ab") as file:
                file.write(waiting.view(np.uint8).data)
            self.runs.append(len(waiting))

    def opened(self) -> list[np.ndarray]:
        """Return the records of every run, memory-mapped."""
        if not self.runs:
            return []
        records = np.memmap(self.path, self.dtype, "r", shape=(sum(self.runs),))
        return np.split(records, np.cumsum(self.runs)[:-1])


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
    """Merge the runs of all parts into ``cells.npy`` and the files of its ranges.

    The order is a total one, so how the records came to their runs changes no byte. ``tokens`` of
    the whole corpus say how many bytes a position takes, ``share`` which positions were kept.
    """
    runs, dtype = [run for spool in spools for run in spool.opened()], spools[0].dtype
    counts = np.zeros(num_cells, np.int64)
    for run in runs:
        counts += np.bincount(run["cell"], minlength=num_cells)
    width, rows = dtype["code"].shape[0], int(counts.sum())
    coded: Codes = Int8Codes(width)
    if codes != "int8":
        coded = ProductCodes.learn(_sample(runs, dtype, rows, share), codes)
        np.save(directory / layout.CELL_CENTRES_FILE, coded.centres)
    sizes = 4 if tokens <= 2**32 else 8, 2 if vocabulary <= 2**16 else 4
    types = cells.record_type(coded, *sizes), np.dtype("<i8"), np.dtype("<i8")
    written = 0
    with ExitStack() as files, progress.task("Sorting positions", rows, "positions") as task:
        append, append_keys, append_starts = (
            files.enter_context(layout.array_file(directory / name, kind))
            for name, kind in zip(layout.CELL_FILES, types, strict=True)
        )
        for first, last in _stretches(counts, max(1, SORT_BYTES // dtype.itemsize)):
            inside = [slice(*(bisect_left(run["cell"], i) for i in (first, last))) for run in runs]
            records = in_order([run[s] for run, s in zip(runs, inside, strict=True)], dtype)
            kept = np.empty(len(records), types[0])
            for name in ("position", "read", "probability"):
                kept[name] = records[name]
            coded.put(records, kept)
            key = records["cell"].astype(np.int64) * vocabulary + records["token"]
            keys, begins = np.unique(key, return_index=True)
            append(kept)
            append_keys(keys)
            append_starts(begins + written)
            written += len(records)
            task.advance(len(records))
    return asdict(cells.CellsMeta(codes, share, rows, vocabulary, width, *sizes))


def _sample(runs: list[np.ndarray], dtype: np.dtype, rows: int, share: float) -> np.ndarray:
    """Return states of some 65,536 positions, whatever run they are in, in order: [n, d]."""
    # Those that were kept have the lowest hashes already.
    share *= min(1.0, SAMPLE / max(1, rows))
    found = [run[drawn(run["position"], share)] for run in runs]
    sample = np.concatenate([np.empty(0, dtype), *found])
    sample = sample[np.argsort(sample["position"])]
    width = dtype["code"].shape[0]
    return Int8Codes(width).states(sample).numpy() if len(sample) else np.zeros((1, width), "f4")


def _stretches(counts: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of successive cells that hold at most ``most`` records, or are one."""
    ends, first = np.cumsum(counts), 0
    while first < len(counts):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield first, last
        first = last


def write_documents(directory: Path, corpus: Corpus, split: Split) -> None:
    """Write ``cell-documents.parquet``: every document of the split, in the order of the corpus."""
    numbers, path = corpus.split(split), directory / layout.CELL_DOCUMENTS_FILE
    options: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
    with pq.ParquetWriter(path, DOCUMENT_SCHEMA, **options) as writer:
        for first in range(0, len(numbers), DOCUMENTS_AT_ONCE):
            table = corpus.documents.take(numbers[first : first + DOCUMENTS_AT_ONCE])
            writer.write_table(table.select(DOCUMENT_SCHEMA.names))
