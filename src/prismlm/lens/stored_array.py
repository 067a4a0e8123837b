"""Arrays in an object store, read in blocks."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

BLOCK = 2**17
# Blocks of a slice that are kept for the next read; a longer one is of a pass over the array.
KEPT_BLOCKS = 32

# Returns ranges of bytes, [first, last), of a file, ascending; and whether to keep them.
Read = Callable[[Sequence[tuple[int, int]], bool], list[bytes]]


class StoredArray:
    """An array [n] in a file of a store: the part of ``np.memmap`` that readers of a lens use.

    It is read in blocks of whole elements, all blocks of one call at once; ``offset`` is that of
    the first element in the file.
    """

    def __init__(self, read: Read, dtype: np.dtype, rows: int, offset: int = 0) -> None:
        self.dtype, self._rows = dtype, rows
        self._read, self._offset = read, offset
        self._per_block = max(1, BLOCK // dtype.itemsize)

    @classmethod
    def from_header(cls, read: Read, header: bytes, size: int) -> StoredArray:
        """Open an array that ``np.save`` wrote to a file of some bytes; ValueError otherwise."""
        stream = io.BytesIO(header)
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        if len(shape) != 1 or stream.tell() + shape[0] * dtype.itemsize != size:
            raise ValueError(f"an array of the shape {list(shape)} does not fill {size:,} bytes")
        return cls(read, dtype, shape[0], stream.tell())

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, key: int | slice) -> Any:
        if not isinstance(key, slice):
            return self.take(np.array([key + self._rows * (key < 0)]))[0]
        start, stop, _ = key.indices(self._rows)
        first = start // self._per_block
        numbers = range(first, -(-stop // self._per_block))
        blocks = self._blocks(numbers, keep=len(numbers) <= KEPT_BLOCKS)
        whole = np.concatenate([np.empty((0, self.dtype.itemsize), "u1"), *blocks])
        rows = slice(start - first * self._per_block, max(start, stop) - first * self._per_block)
        return whole[rows].view(self.dtype)[:, 0]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return copies of elements, in the order of ``rows``, int64 [m]."""
        number, within = np.divmod(rows, self._per_block)
        order = np.argsort(number, kind="stable")
        distinct, first = np.unique(number[order], return_index=True)
        result = np.empty((len(rows), self.dtype.itemsize), "u1")
        parts = np.split(order, first[1:])
        for block, chosen in zip(self._blocks(distinct.tolist()), parts, strict=False):
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
        result, numbers = low * self._per_block, np.unique(low[high > 0]).tolist()
        for number, block in zip(numbers, self._blocks(numbers), strict=True):
            here = low == number
            result[here] += block.view(self.dtype)[:, 0].searchsorted(values[here], side)
        return result

    def _blocks(self, numbers: Sequence[int], *, keep: bool = True) -> list[np.ndarray]:
        """Return blocks, uint8 [n, bytes]: bytes are copied faster than the fields of records."""
        size, edges = self.dtype.itemsize, [(n, n + 1) for n in numbers]
        rows = [(a * self._per_block, min(b * self._per_block, self._rows)) for a, b in edges]
        spans = [(self._offset + a * size, self._offset + b * size) for a, b in rows]
        return [np.frombuffer(part, "u1").reshape(-1, size) for part in self._read(spans, keep)]
