"""Limits on the files of this process: their size, as of a disk without room, and their number."""

import os
import resource
import sys
from contextlib import contextmanager


def limit_files(size: int) -> None:
    """Let no file grow beyond ``size`` bytes; modules first imported then leave no cut bytecode."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def few_open_files(more: int):
    """Let this process open only so many files beyond those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def limit_lifted_after():
    """Undo on leaving what ``limit_files`` set inside."""
    limits, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = bytecode
