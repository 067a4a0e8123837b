"""Positions on disk while an index is under way: sorted runs in one file, one after another."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prismlm.corpus.windows import PASS_TOKENS
from prismlm.errors import FormatError
from prismlm.index import cells
from prismlm.index.codes import Int8Codes

# Records held in memory before they are written as a run.
BUFFER_BYTES = 2**24
READ_BYTES = 2**22
ORDER = ("cell", "token", "position")


class Run(NamedTuple):
    """A sorted run: how many records, and the CRC-32 of their bytes."""

    rows: int
    checksum: int


def record_type(width: int) -> np.dtype:
    """Return the record of a position while the index is made.

    ``cell`` is the nearest prototype, ``token`` the next token, ``position`` a global offset,
    ``read`` the token there, ``probability`` what the model gave the next one, and
    scale · code / 127 the unit hidden state. Records are sorted by the first three.
    """
    return np.dtype([("cell", "<i4"), ("token", "<i4"), *cells.record_type(Int8Codes(width)).descr])


def quantise(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code unit states in int8, each with a scale of its own: z ≈ scale · code / 127.

    Args:
        states: float32 [N, d].

    Returns:
        scales float16 [N], the largest magnitude of each row, and codes int8 [N, d].
    """
    scales = np.abs(states).max(1).astype(np.float16)
    factor = np.divide(127, scales, out=np.zeros(len(scales), np.float32), where=scales > 0)
    codes = np.rint(states * factor[:, None]).clip(-127, 127).astype(np.int8)
    return scales, codes


def in_order(records: np.ndarray) -> np.ndarray:
    """Return the records sorted by cell, then next token, then position."""
    return records[np.lexsort([records[name] for name in reversed(ORDER)])]


class Spool:
    """The records of one shard: a file that grows by sorted runs.

    What was written after the runs that are given, by a process that was killed, is cut off when
    the first new run is written.

    Args:
        path: the file.
        width: d.
        runs: what the file is known to hold.
    """

    def __init__(self, path: Path, width: int, runs: Sequence[Run] = ()) -> None:
        self.path = path
        self.dtype = record_type(width)
        self.runs = list(runs)
        self._waiting, self._held = np.empty(0, self.dtype), 0

    @property
    def rows(self) -> int:
        """How many records the runs hold."""
        return sum(run.rows for run in self.runs)

    @property
    def full(self) -> bool:
        """Whether as much waits as memory is meant for."""
        return self._held * self.dtype.itemsize >= BUFFER_BYTES

    def add(self, records: np.ndarray) -> None:
        """Take records; they wait for :meth:`flush`.

        They wait in one array. Many small ones would lie between those of the passes, and where
        these are freed, leave gaps that the next do not fit. So would one that is made anew: it has
        room for a whole pass more than makes it full.
        """
        held = self._held + len(records)
        if held > len(self._waiting):
            full = BUFFER_BYTES // self.dtype.itemsize
            larger = np.empty(max(held, full) + PASS_TOKENS, self.dtype)
            larger[: self._held] = self._waiting[: self._held]
            self._waiting = larger
        self._waiting[self._held : held] = records
        self._held = held

    def flush(self) -> None:
        """Write what waits as one run, to the disk itself.

        Raises:
            OSError: the disk is full or failing; what waits is kept.
            FormatError: the file is shorter than its runs.
        """
        if not self._held:
            return
        data = in_order(self._waiting[: self._held]).view(np.uint8)
        end = self.rows * self.dtype.itemsize
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            if file.seek(0, os.SEEK_END) < end:
                raise damaged(self.path, f"it is shorter than the {end} bytes that were written")
            file.truncate(end)
            file.seek(end)
            file.write(data.data)
            file.flush()
            os.fsync(file.fileno())
        self.runs.append(Run(len(data) // self.dtype.itemsize, zlib.crc32(data.data)))
        self._held = 0

    def counts(self, num_cells: int) -> np.ndarray:
        """Return how many records of each cell each run has, int64 [runs, K]; reads every byte.

        Raises:
            FormatError: the file does not hold what was written.
        """
        found = np.zeros((len(self.runs), num_cells), dtype=np.int64)
        for number, run in enumerate(self.runs):
            checksum = 0
            for part in self.parts(sum(r.rows for r in self.runs[:number]), run.rows):
                checksum = zlib.crc32(part.view(np.uint8).data, checksum)
                cell = part["cell"]
                if len(cell) and (cell.min() < 0 or cell.max() >= num_cells):
                    raise damaged(self.path, "a cell is out of range")
                found[number] += np.bincount(cell, minlength=num_cells)
            if checksum != run.checksum:
                raise damaged(self.path, "its contents are not what was written")
        return found

    def read(self, first: int, rows: int, into: np.ndarray | None = None) -> np.ndarray:
        """Return records by their place in the file, in an array that is given or in a new one.

        Raises:
            FormatError: the file ends before.
        """
        records = np.empty(rows, self.dtype) if into is None else into[:rows]
        try:
            with self.path.open("rb") as file:
                file.seek(first * self.dtype.itemsize)
                found = file.readinto(records.view(np.uint8).data)
        except OSError as error:
            raise damaged(self.path, error) from error
        if found != records.nbytes:
            raise damaged(self.path, "it is cut off")
        return records

    def key(self, place: int) -> tuple[int, ...]:
        """Return what a record is sorted by, by its place in the file."""
        record = self.read(place, 1)[0]
        return tuple(int(record[name]) for name in ORDER)

    def parts(self, first: int, rows: int) -> Iterator[np.ndarray]:
        """Yield some megabytes of records after another, by their place in the file."""
        most = max(1, READ_BYTES // self.dtype.itemsize)
        for start in range(first, first + rows, most):
            yield self.read(start, min(most, first + rows - start))


def damaged(path: Path, why: object) -> FormatError:
    """Return the error of a file of an index under way that is not what was written."""
    return FormatError(
        f"{path} is damaged ({why}). Delete it with the .safetensors file of the same name, and "
        "the same command scans this part anew."
    )
