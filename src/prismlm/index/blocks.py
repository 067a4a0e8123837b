"""Files that are read a little at a time, and compared with their checksums as they are."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from prismlm.errors import FormatError

BLOCK_BYTES = 2**16


def checksums_of(array: np.ndarray) -> np.ndarray:
    """Return the CRC-32 of every 64 KB of an array, uint32 [blocks]."""
    data = array.reshape(-1).view(np.uint8).data
    starts = range(0, len(data), BLOCK_BYTES)
    return np.array([zlib.crc32(data[at : at + BLOCK_BYTES]) for at in starts], np.uint32)


class Blocks:
    """An array [n] on disk, whose blocks are compared with their checksums when first read.

    Args:
        path: its file, to name it.
        array: the memory-mapped array.
        checksums: as :func:`checksums_of` gives them.
    """

    def __init__(self, path: Path, array: np.ndarray, checksums: np.ndarray) -> None:
        self._path, self._checksums, self.dtype = path, checksums, array.dtype
        self._data = array.view(np.uint8).data
        self._right = np.zeros(len(checksums), dtype=bool)

    def __len__(self) -> int:
        return len(self._data) // self.dtype.itemsize

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of elements from ``start`` up to, without, ``stop``; fewer at the end.

        Raises:
            FormatError: they are not what was written.
        """
        size = self.dtype.itemsize
        first, last = start * size // BLOCK_BYTES, (stop * size - 1) // BLOCK_BYTES
        if not self._right[first : last + 1].all():
            for block in range(first, min(last + 1, len(self._right))):
                data = self._data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                if zlib.crc32(data) != self._checksums[block]:
                    raise FormatError(
                        f"{self._path} is damaged (block {block} is not what was written). Build "
                        "the lens again."
                    )
                self._right[block] = True
        return self._data[start * size : stop * size].tobytes()
