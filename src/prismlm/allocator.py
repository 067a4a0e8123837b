"""Settings of glibc's allocator."""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MAX_BLOCK_BYTES, MIN_MAPPED_BYTES = 2**30, 2**20
_returning = False
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed memory, up to 2 GiB, in the process instead of returning it to the system.

    A step on a CPU frees tensors of many megabytes and allocates as many again. glibc returns such
    blocks to the kernel, which zeroes and maps them again page by page: a good part of a training
    step of a small model. Settings in the environment take precedence.

    Returns:
        whether glibc accepted the setting; not after :func:`return_freed_memory`.
    """
    if _returning:
        return False
    return _set((M_MMAP_THRESHOLD, MAX_BLOCK_BYTES), (M_TRIM_THRESHOLD, 2 * MAX_BLOCK_BYTES - 1))


def return_freed_memory() -> bool:
    """Return freed blocks of a mebibyte or more to the system, from now on.

    Where weights are read from a disk for each pass, glibc would keep as many in fragments as the
    whole model has.
    """
    global _returning
    _returning = True
    return _set((M_MMAP_THRESHOLD, MIN_MAPPED_BYTES))


def _set(*settings: tuple[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
