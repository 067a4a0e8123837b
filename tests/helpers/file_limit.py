"""A limit on the size of files of this process, as of a disk without room."""

import resource
import sys
from contextlib import contextmanager


def limit_files(size: int) -> None:
    """Let no file grow beyond ``size`` bytes; modules first imported then leave no cut bytecode."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def limit_lifted_after():
    """Undo on leaving what ``limit_files`` set inside."""
    limits, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = bytecode
