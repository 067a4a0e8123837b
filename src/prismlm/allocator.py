"""Memory of the C library: freed blocks that the next step asks for again, or that none does."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

# Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Larger blocks still go back to the system at once, and so does free memory beyond twice as much.
KEPT_BYTES = 2**30
RETURNED_BYTES = 2**20
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the process keep freed memory, up to 2 GiB, in place of returning it to the system.

    A step on a CPU frees tensors of many megabytes and asks for as many again. glibc returns such
    blocks to the kernel, which hands them out again page by page, cleared: with small models a good
    part of a training step. No number changes. Only glibc is told, and not where the
    environment sets its allocator already.

    Returns:
        Whether glibc took the setting.
    """
    return _blocks_from(KEPT_BYTES)


def return_freed_memory() -> None:
    """Return to the system what :func:`keep_freed_memory` kept, where other work comes next.

    Blocks of other sizes fit few of the gaps that many passes left, and would come on top of them.
    """
    pa.default_memory_pool().release_unused()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Undo :func:`keep_freed_memory` during the block, for large blocks each of another size.

    What was kept is returned at once, and blocks of a megabyte that fit no gap as they are freed.
    """
    _blocks_from(RETURNED_BYTES)
    return_freed_memory()
    try:
        yield
    finally:
        _blocks_from(KEPT_BYTES)


def _blocks_from(size: int) -> bool:
    """Let blocks from a size on, and twice as much of free memory, go back to the system."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = ((M_MMAP_THRESHOLD, size), (M_TRIM_THRESHOLD, 2 * size - 1))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
