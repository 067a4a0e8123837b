"""Locks between processes on one machine, which the kernel gives back however a process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prismlm.errors import InputError
from prismlm.files import remove_left_behind


class Held(Exception):
    """Another process has the lock.

    Attributes:
        process: its id; empty where the lock is shared.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"held by process {process}")
        self.process = process


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold a lock on the file ``path``, which is made if it is not there.

    Args:
        path: the lock file; its directory must exist. It is left behind.
        shared: several processes may hold it at once, if all of them ask so.
        wait: until it is free, instead of raising.

    Raises:
        Held: another process has it.
        FileNotFoundError: there is no such directory, or no longer.
    """
    descriptor = _lock(path, shared=shared, wait=wait)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other processes that ask for it from writing to ``path`` during the block.

    What one that was killed left half-written beside it is removed.

    Raises:
        InputError: another process writes to it.
    """
    target = Path(path)
    lock = target.with_name(f".{target.name}.lock")
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock))
        except Held as holder:
            raise InputError(
                f"{target} is being written by another process, {holder.process}. Wait until it "
                "has ended, or choose another name."
            ) from None
        held.callback(lock.unlink, missing_ok=True)
        remove_left_behind(target)
        yield


def _lock(path: Path, *, shared: bool, wait: bool) -> int:
    """Return an open file that is locked and still has its name."""
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, kind)
            # Whoever held the lock before may have removed the file in between.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                if not shared:
                    os.truncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise Held(holder) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
