"""Arrays and files in an object store, read in blocks that one cache of limited size holds."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from threading import Lock
from typing import Any, Literal

import numpy as np

from prismlm.errors import check_whole

BLOCK = 2**16
# Successive blocks of one request, and bytes from which a slice is read without the cache.
RUN, LONG = 16, 2**23
CACHE_VARIABLE, CACHE_MEGABYTES = "PRISMLM_LENS_CACHE_MB", 256

# Blocks that were read, by file and number, the oldest first.
CACHED: dict[tuple[str, int], Any] = {}
LOCK = Lock()
# Returns ranges of bytes, [first, last), of a file.
Read = Callable[[Sequence[tuple[int, int]]], list[bytes]]


class StoredArray:
    """An array [n] in a file of a store: the part of ``np.memmap`` that readers of a lens use.

    It is read in blocks of whole elements, all blocks of one call at once. ``key`` names the file
    and its version; ``offset`` is that of the first element in it.
    """

    def __init__(self, read: Read, key: str, dtype: np.dtype, rows: int, offset: int = 0) -> None:
        self.dtype, self._rows = dtype, rows
        self._read, self._key, self._offset = read, key, offset
        self._per_block = max(1, BLOCK // dtype.itemsize)

    @classmethod
    def from_header(cls, read: Read, key: str, header: bytes, size: int) -> StoredArray:
        """Open an array that ``np.save`` wrote to a file of some bytes; ValueError otherwise."""
        stream = io.BytesIO(header)
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        if len(shape) != 1 or stream.tell() + shape[0] * dtype.itemsize != size:
            raise ValueError(f"an array of the shape {list(shape)} does not fill {size:,} bytes")
        return cls(read, key, dtype, shape[0], stream.tell())

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, key: int | slice) -> Any:
        if not isinstance(key, slice):
            return self.take(np.array([key + self._rows * (key < 0)]))[0]
        start, stop, _ = key.indices(self._rows)
        stop = max(start, stop)
        if (stop - start) * self.dtype.itemsize > LONG:
            return np.frombuffer(self._read([self._span(start, stop)])[0], self.dtype)
        first = start // self._per_block
        blocks = self.blocks(range(first, -(-stop // self._per_block)))
        whole = np.concatenate([np.empty((0, self.dtype.itemsize), "u1"), *blocks.values()])
        return whole.view(self.dtype)[start - first * self._per_block :, 0][: stop - start]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return copies of elements, in the order of ``rows``, int64 [m]."""
        number, within = np.divmod(rows, self._per_block)
        order = np.argsort(number, kind="stable")
        distinct, first = np.unique(number[order], return_index=True)
        blocks = self.blocks(distinct.tolist())
        result = np.empty((len(rows), self.dtype.itemsize), "u1")
        for block, chosen in zip(blocks.values(), np.split(order, first[1:]), strict=False):
            result[chosen] = block[within[chosen]]
        return result.view(self.dtype)[:, 0]

    def searchsorted(
        self, values: np.ndarray, side: Literal["left", "right"] = "left"
    ) -> np.ndarray:
        """As of ``np.ndarray``, of values [m]: bisection over blocks for all, then within one."""
        low = np.zeros(len(values), np.int64)
        high = np.full(len(values), -(-self._rows // self._per_block))
        while (open_ := high - low > 1).any():
            middle = (low + high) // 2
            first = self.take(middle[open_] * self._per_block)
            later = first < values[open_] if side == "left" else first <= values[open_]
            low[open_] = np.where(later, middle[open_], low[open_])
            high[open_] = np.where(later, high[open_], middle[open_])
        result = low * self._per_block
        for number, block in self.blocks(np.unique(low[high > 0]).tolist()).items():
            here = low == number
            result[here] += block.view(self.dtype)[:, 0].searchsorted(values[here], side)
        return result

    def blocks(self, numbers: Iterable[int]) -> dict[int, np.ndarray]:
        """Return blocks by number, which ascend, from the cache or the store: uint8 [n, bytes].

        Bytes are copied faster than the fields of records.
        """
        known = {number: CACHED.get((self._key, number)) for number in numbers}
        missing = [number for number, block in known.items() if block is None]
        # Successive numbers, up to a limit, are one request.
        grouped = groupby(enumerate(missing), lambda one: (one[1] - one[0], one[1] // RUN))
        runs = [[number for _, number in run] for _, run in grouped]
        edges = [(run[0] * self._per_block, (run[-1] + 1) * self._per_block) for run in runs]
        spans = [self._span(first, min(last, self._rows)) for first, last in edges]
        for run, part in zip(runs, self._read(spans) if spans else [], strict=True):
            values = np.frombuffer(part, "u1").reshape(-1, self.dtype.itemsize)
            for place, number in enumerate(run):
                # A copy, since a view keeps all of its run in memory.
                known[number] = values[place * self._per_block :][: self._per_block].copy()
        with LOCK:
            CACHED.update({(self._key, number): known[number] for number in missing})
            while len(CACHED) * BLOCK > cache_bytes():
                del CACHED[next(iter(CACHED))]
        return known  # pyright: ignore[reportReturnType]

    def _span(self, first: int, last: int) -> tuple[int, int]:
        size = self.dtype.itemsize
        return self._offset + first * size, self._offset + last * size


def cache_bytes() -> int:
    """Return the size of the cache, which an environment variable sets."""
    value = os.environ.get(CACHE_VARIABLE) or str(CACHE_MEGABYTES)
    megabytes = check_whole(CACHE_VARIABLE, int(value) if value.isdecimal() else value, 1)
    return megabytes * 10**6
