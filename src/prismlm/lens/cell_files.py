"""How the cells of a lens are written, without reading all positions in one process.

Each part of the corpus leaves its positions in one sorted file, a :class:`Run`. The cells are then
divided into ranges of about equal size, and any process writes a range from the slices of all runs,
a few cells at a time. Neither the parts nor the ranges change a record or its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from prismlm.files import atomic_file
from prismlm.lens import layout
from prismlm.lens.cells import CellsMeta, CodeName, Codes, record_type
from prismlm.lens.options import IndexOptions
from prismlm.progress import SILENT, Reporter

# Records that are sorted in memory, at least those of one cell and next token.
SORT_BYTES = 2**25
# A range may have this share of all positions, whatever its bytes: a reader maps its three files,
# and Linux allows some 65,000 maps.
RANGE_SHARE = 1 / 4096
Range = tuple[int, int]


def cells_format(
    width: int, vocabulary: int, tokens: int, codes: CodeName = "int8", share: float = 1.0
) -> CellsMeta:
    """Return the format of cells without rows; ``tokens`` are those of the corpus."""
    sizes = 4 if tokens <= 2**32 else 8, 2 if vocabulary <= 2**16 else 4
    return CellsMeta(codes, share, 0, vocabulary, width, *sizes)


def spooled_type(codes: Codes, cells: CellsMeta) -> np.dtype:
    """Return the record of a position that is not in its cell yet: where it belongs, then it."""
    stored = record_type(codes, cells.position_bytes, cells.token_bytes)
    return np.dtype([("cell", "<i4"), ("token", "<i4"), *stored.descr])


def stored_type(spooled: np.dtype) -> np.dtype:
    """Return the record without cell and next token, as a lens has it."""
    return np.dtype(spooled.descr[2:])


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

    def cells(self, first: int, last: int) -> np.ndarray:
        """Return the records of cells from ``first`` up to, not including, ``last``.

        They are a map, which holds a file descriptor as long as it exists.
        """
        begin, end = self.ends[[first, last]].tolist()
        if begin == end:
            return np.empty(0, self.dtype)
        offset = (self.start + begin) * self.dtype.itemsize
        return np.memmap(self.path, self.dtype, "r", offset, (end - begin,))


def write_run(path: Path, batches: Iterable[np.ndarray], dtype: np.dtype, num_cells: int) -> Run:
    """Write the records of one part of the corpus, in any order, sorted in constant memory."""
    pending, runs, rows = list[np.ndarray](), list[Run](), 0
    with path.open("wb") as file:
        for records in chain(batches, [None]):
            pending += [] if records is None else [records]
            full = sum(part.nbytes for part in pending) >= SORT_BYTES
            if full or (records is None and (pending or not runs)):
                part, pending = _sorted(pending, dtype), []
                file.write(part.view(np.uint8).data)
                counts = np.bincount(part["cell"], minlength=num_cells)
                runs.append(Run(path, dtype, counts, rows))
                rows += len(part)
    if len(runs) > 1:
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            for part in merged(runs, (0, num_cells)):
                file.write(part.view(np.uint8).data)
    return Run(path, dtype, total_counts(runs))


def total_counts(runs: Sequence[Run]) -> np.ndarray:
    """Return the records of each cell in all runs, int64 [K]."""
    return np.sum([run.counts for run in runs], axis=0)


def merged(runs: Sequence[Run], cells: Range) -> Iterator[np.ndarray]:
    """Yield the records of a range of cells in order; those of one cell and token together."""
    first, dtype = cells[0], runs[0].dtype
    most = max(1, SORT_BYTES // dtype.itemsize)
    counts = total_counts(runs)[slice(*cells)]
    for begin, end in grouped(counts, most):
        part = first + begin, first + end
        # Copies, since maps of all runs at once could be more files than a process may open.
        if counts[begin:end].sum() <= most:
            yield _sorted([np.array(run.cells(*part)) for run in runs], dtype)
            continue
        # A single cell that is too large: a few next tokens at a time.
        columns = [np.array(run.cells(*part)["token"]) for run in runs]
        size = 1 + max(int(column[-1]) for column in columns if len(column))
        tokens = np.zeros(size, np.int64)
        for column in columns:
            tokens += np.bincount(column, minlength=size)
        for pair in grouped(tokens, most):
            rows = [slice(*np.searchsorted(column, pair)) for column in columns]
            some = zip(runs, rows, strict=True)
            yield _sorted([np.array(run.cells(*part)[of_pair]) for run, of_pair in some], dtype)


def _sorted(parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    records = np.concatenate([np.empty(0, dtype), *parts])
    return records[np.lexsort([records[name] for name in ("position", "token", "cell")])]


def grouped(counts: np.ndarray, most: int) -> Iterator[Range]:
    """Yield (first, last) of successive counts that sum to at most ``most``, or of one."""
    ends, first = np.append(0, np.cumsum(counts)), 0
    while first < len(counts):
        last = int(np.searchsorted(ends, ends[first] + most, side="right")) - 1
        last = max(first + 1, last)
        yield first, last
        first = last


def ranges_of(runs: Sequence[Run], range_bytes: int = IndexOptions.range_bytes) -> list[Range]:
    """Divide the cells into ranges of ``range_bytes``, or larger ones if they would be many."""
    counts = total_counts(runs)
    most = max(1, range_bytes // stored_type(runs[0].dtype).itemsize)
    return list(grouped(counts, max(most, int(counts.sum() * RANGE_SHARE))))


def write_range(
    directory: Path,
    runs: Sequence[Run],
    ranges: Sequence[Range],
    number: int,
    vocabulary: int,
    progress: Reporter = SILENT,
) -> None:
    """Write the files of one of the ranges of cells; V is the size of the vocabulary."""
    cells, names = ranges[number], layout.cell_files(number, len(ranges))
    stored = stored_type(runs[0].dtype)
    rows, written = int(total_counts(runs)[slice(*cells)].sum()), 0
    with (
        layout.array_file(directory / names[0], stored) as append,
        layout.array_file(directory / names[1], np.dtype("<i8")) as append_keys,
        layout.array_file(directory / names[2], np.dtype("<i8")) as append_starts,
        progress.task("Sorting positions", rows, "positions") as task,
    ):
        for records in merged(runs, cells):
            key = records["cell"].astype(np.int64) * vocabulary + records["token"]
            keys, starts = np.unique(key, return_index=True)
            data = records.view(np.uint8).reshape(-1, records.itemsize)[:, -stored.itemsize :]
            append(np.ascontiguousarray(data).view(stored)[:, 0])
            append_keys(keys)
            append_starts(starts + written)
            written += len(records)
            task.advance(len(records))


def cells_entry(meta: CellsMeta, runs: Sequence[Run], ranges: Sequence[Range]) -> dict[str, Any]:
    """Return the entry of the cells in ``meta.json``."""
    counts = total_counts(runs)
    entry = asdict(replace(meta, rows=int(counts.sum())))
    if len(ranges) > 1:
        entry["ranges"] = [
            {"first_cell": first, "rows": int(counts[first:last].sum())} for first, last in ranges
        ]
    return entry
