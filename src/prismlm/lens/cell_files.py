"""How the cells of a lens are written, without reading all positions in one process.

Each part of the corpus leaves its positions in one sorted file, a :class:`Run`. The cells are then
divided into ranges of about equal size, and any process writes a range from the slices of all runs,
a few cells at a time. Neither the parts nor the ranges change a record or its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prismlm.files import atomic_file
from prismlm.lens import layout
from prismlm.lens.cells import CellsMeta, CodeName, record_type
from prismlm.lens.options import IndexOptions
from prismlm.progress import SILENT, Reporter

# Records that are sorted in memory, at least those of one cell and next token.
SORT_BYTES = 2**25
# A range may have this share of all positions, whatever its bytes: a reader maps its three files,
# and Linux allows some 65,000 maps.
RANGE_SHARE = 1 / 4096


def cells_format(
    width: int, vocabulary: int, tokens: int, codes: CodeName = "int8", share: float = 1.0
) -> CellsMeta:
    """Return the format of cells without rows; ``tokens`` are those of the corpus."""
    sizes = 4 if tokens <= 2**32 else 8, 2 if vocabulary <= 2**16 else 4
    return CellsMeta(codes, share, 0, vocabulary, width, *sizes)


def spooled_type(cells: CellsMeta) -> np.dtype:
    """Return the record of a position that is not in its cell yet: where it belongs, then it."""
    return np.dtype([("cell", "<i4"), ("token", "<i4"), *record_type(cells).descr])


@dataclass(frozen=True)
class Run:
    """Sorted records in a file, from row ``start`` on: by cell, next token and position."""

    path: Path
    dtype: np.dtype
    counts: np.ndarray  # of the records of each cell, int64 [K]
    start: int = 0

    @cached_property
    def ends(self) -> np.ndarray:
        """The row after each cell, after a 0: int64 [K + 1]."""
        return np.append(0, np.cumsum(self.counts))

    def rows(self, first: int, last: int) -> slice:
        """Return the rows of cells from ``first`` up to, not including, ``last``."""
        return slice(*(self.start + self.ends[[first, last]]).tolist())


def write_run(path: Path, batches: Iterable[np.ndarray], dtype: np.dtype, num_cells: int) -> Run:
    """Write the records of one part of the corpus, in any order, sorted in constant memory."""
    runs, rows = list[Run](), 0
    with path.open("wb") as file:
        for records in _sorted_pieces(batches, dtype):
            file.write(records.view(np.uint8).data)
            counts = np.bincount(records["cell"], minlength=num_cells)
            runs.append(Run(path, dtype, counts, rows))
            rows += len(records)
    if len(runs) > 1:
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            for records in merged(runs, 0, num_cells):
                file.write(records.view(np.uint8).data)
    return Run(path, dtype, np.sum([run.counts for run in runs], axis=0))


def _sorted_pieces(batches: Iterable[np.ndarray], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the records of successive batches, sorted, at least one piece."""
    pending, size = list[np.ndarray](), 0
    for records in batches:
        pending.append(records)
        size += records.nbytes
        if size >= SORT_BYTES:
            yield _sorted(pending, dtype)
            pending, size = [], 0
    yield _sorted(pending, dtype)


def merged(runs: Sequence[Run], first: int, last: int) -> Iterator[np.ndarray]:
    """Yield the records of a range of cells in order; those of one cell and token together."""
    dtype = runs[0].dtype
    most = max(1, SORT_BYTES // dtype.itemsize)
    counts = np.sum([run.counts[first:last] for run in runs], axis=0)
    for begin, end in grouped(counts, most):
        # One map for all runs of a file: thousands would be more than a process can address.
        maps = {path: layout.map_file(path, dtype) for path in {run.path for run in runs}}
        parts = [maps[run.path][run.rows(first + begin, first + end)] for run in runs]
        if counts[begin:end].sum() <= most:
            yield _sorted(parts, dtype)
            continue
        # A single cell that is too large: a few next tokens at a time.
        columns = [np.array(part["token"]) for part in parts]
        size = 1 + max(int(column[-1]) for column in columns if len(column))
        tokens: Any = sum(np.bincount(column, minlength=size) for column in columns)
        for pair in grouped(tokens, most):
            rows = [slice(*np.searchsorted(column, pair)) for column in columns]
            yield _sorted([part[some] for part, some in zip(parts, rows, strict=True)], dtype)


def _sorted(parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    records = np.concatenate([np.empty(0, dtype), *parts])
    return records.take(np.lexsort([records[name] for name in ("position", "token", "cell")]))


def grouped(counts: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of successive counts that sum to at most ``most``, or of one."""
    ends, first = np.append(0, np.cumsum(counts)), 0
    while first < len(counts):
        last = int(np.searchsorted(ends, ends[first] + most, side="right")) - 1
        last = max(first + 1, last)
        yield first, last
        first = last


@dataclass(frozen=True)
class CellFiles:
    """The cells of a lens, to be written from the runs of all parts in ranges."""

    meta: CellsMeta
    runs: Sequence[Run]
    range_bytes: int = IndexOptions.range_bytes

    @cached_property
    def counts(self) -> np.ndarray:
        """The positions of each cell, int64 [K]."""
        return np.sum([run.counts for run in self.runs], axis=0)

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """First and last cell of each range: of ``range_bytes``, or larger if they are many."""
        rows = max(1, self.range_bytes // record_type(self.meta).itemsize)
        return list(grouped(self.counts, max(rows, int(self.counts.sum() * RANGE_SHARE))))

    def write(self, directory: Path, number: int, progress: Reporter = SILENT) -> None:
        """Write the files of one range."""
        first, last = self.ranges[number]
        names = layout.file_names(layout.CELL_FILES, len(self.ranges))[3 * number :][:3]
        stored, written = record_type(self.meta), 0
        rows = int(self.counts[first:last].sum())
        with (
            layout.array_file(directory / names[0], stored) as append,
            layout.array_file(directory / names[1], np.dtype("<i8")) as append_keys,
            layout.array_file(directory / names[2], np.dtype("<i8")) as append_starts,
            progress.task("Sorting positions", rows, "positions") as task,
        ):
            for records in merged(self.runs, first, last):
                key = records["cell"].astype(np.int64) * self.meta.vocabulary + records["token"]
                keys, starts = np.unique(key, return_index=True)
                append(records[list(stored.names or ())])
                append_keys(keys)
                append_starts(starts + written)
                written += len(records)
                task.advance(len(records))

    def entry(self) -> dict[str, Any]:
        """Return the entry of the cells in ``meta.json``."""
        entry = asdict(replace(self.meta, rows=int(self.counts.sum())))
        if len(self.ranges) > 1:
            rows = [int(self.counts[first:last].sum()) for first, last in self.ranges]
            entry["ranges"] = [
                {"first_cell": first, "rows": count}
                for (first, _), count in zip(self.ranges, rows, strict=True)
            ]
        return entry
