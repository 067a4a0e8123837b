"""Settings of glibc's allocator."""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MAX_BLOCK_BYTES = 2**30
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed memory, up to 2 GiB, in the process instead of returning it to the system.

    A step on a CPU frees tensors of many megabytes and allocates as many again. glibc returns such
    blocks to the kernel, which zeroes and maps them again page by page: a good part of a training
    step of a small model. Settings in the environment take precedence.

    Returns:
        whether glibc accepted the setting.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = ((M_MMAP_THRESHOLD, MAX_BLOCK_BYTES), (M_TRIM_THRESHOLD, 2 * MAX_BLOCK_BYTES - 1))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
