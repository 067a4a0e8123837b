"""Memory of the C library: freed blocks that the next step asks for again."""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Larger blocks still go back to the system at once, and so does free memory beyond twice as much.
KEPT_BYTES = 2**30
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
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = ((M_MMAP_THRESHOLD, KEPT_BYTES), (M_TRIM_THRESHOLD, 2 * KEPT_BYTES - 1))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
