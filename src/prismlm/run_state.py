"""Long-running work: locks on its output, its recorded settings, and signals."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from prismlm.errors import FormatError, InputError, Interrupted
from prismlm.files import keep_json, read_json, remove_left_behind

LOCK_FILE = ".lock"
RUN_FILE = "run.json"
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}

T = TypeVar("T")


class Busy(InputError):
    """Another process is writing to the same file or directory."""


@contextmanager
def writing(
    path: str | os.PathLike[str], *, within: bool = False, wait: bool = False
) -> Iterator[None]:
    """Lock ``path`` against other processes that write to it, during the block.

    The kernel releases the lock if the process is killed; the next one removes leftover temporary
    files. At the end, a directory that was created only for the lock is removed.

    Args:
        path: a file or directory; it need not exist.
        within: the lock and temporary files are inside the directory, which grows; otherwise
            beside the path, which appears complete.
        wait: for another process instead of raising InputError.
    """
    target = Path(path) if Path(path).name else Path(path).absolute()
    if not target.name:
        raise InputError(f"{path} is not a name to write to: name a file or directory.")
    lock = target / LOCK_FILE if within else target.with_name(f".{target.name}.lock")
    descriptor, created = None, not lock.parent.exists()
    try:
        while descriptor is None:
            lock.parent.mkdir(parents=True, exist_ok=True)
            # The previous holder may remove file and directory while this one waits.
            with suppress(FileNotFoundError):
                descriptor = _locked(lock, wait)
    except BlockingIOError as error:
        raise Busy(
            f"{target} is being written to by another process, {error}. Wait until it has ended, "
            "or choose another place."
        ) from None
    except OSError as error:
        raise InputError(f"cannot write to {lock.parent} ({error}). Choose another.") from error
    try:
        remove_left_behind(target, within=within)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)
        if created:
            with suppress(OSError):  # it is not empty
                lock.parent.rmdir()


def _locked(path: Path, wait: bool) -> int | None:
    """Return the descriptor of the locked file, or None if the file has been replaced meanwhile.

    BlockingIOError names the process that has it.
    """
    descriptor, held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held = os.path.samestat(os.fstat(descriptor), path.stat())
    except BlockingIOError:
        raise BlockingIOError(os.pread(descriptor, 32, 0).decode().strip()) from None
    finally:
        if not held:
            os.close(descriptor)
    if held:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor if held else None


def check_same(what: str, before: Mapping[str, Any], now: Mapping[str, Any], way_out: str) -> None:
    """Raise InputError, with all differences, if settings changed since the work was started.

    ``what`` begins the error, such as "DIR was begun with another corpus"; ``way_out`` ends it.
    """
    changes = [
        f"{key}: {before.get(key, 'not set')} → {now.get(key, 'not set')}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if changes:
        raise InputError(f"{what} ({'; '.join(changes)}). {way_out}")


def read_note(path: Path, directory: Path, **expected: Any) -> dict[str, Any]:
    """Return the recorded settings of unfinished work; FormatError if ``expected`` ones differ."""
    note = read_json(path)
    if not isinstance(note, dict) or any(note.get(k) != v for k, v in expected.items()):
        raise FormatError(
            f"{path} is of another version or damaged: remove {directory} to start over."
        )
    return note


def begin(directory: Path, run: Mapping[str, Any], *, made: bool) -> None:
    """Record the settings of a run in ``run.json``, or check that they are unchanged.

    ``made``: whether the directory has partial results; otherwise the record is replaced.
    """
    path = directory / RUN_FILE
    if not made or not path.is_file():
        keep_json(path, run)
        return
    what = f"{directory} has runs with other settings"
    way_out = "Resume that one, write elsewhere with --out, or remove it."
    check_same(what, read_note(path, directory), run, way_out)


class Interrupts:
    """Records signals during the block, so that the work can stop between two steps.

    A second signal, or any while ``now`` is set, stops at once. Only Python's default handlers are
    replaced, and only in the main thread.

    Args:
        message: returns what is saved and how to resume, as sentences.
        signals: to record.

    Attributes:
        received: the signal, if any.
        now: stop at once, because everything is saved.
    """

    def __init__(
        self,
        message: Callable[[], str] = lambda: "",
        signals: tuple[signal.Signals, ...] = tuple(EXIT_CODES),
    ) -> None:
        self.received: signal.Signals | None = None
        self.now = False
        self._message, self._signals = message, signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                    self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received is not None and exception[0] is None:
            # It came in the last step.
            self.stop()

    def _record(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = signal.Signals(number)
        if again or self.now:
            self.stop()
        # Not print: the signal may have interrupted a print.
        os.write(2, b"\nstopping after this step, to save it; a second time stops at once\n")

    def stop(self) -> None:
        """Raise Interrupted with the message."""
        assert self.received is not None
        raise Interrupted(self._message(), EXIT_CODES[self.received])


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """Convert Ctrl-C in the block to Interrupted, with what is kept and how to resume."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as stop:
        raise Interrupted(f"{kept()} Run the same command again to resume.") from stop


@contextmanager
def orderly_end() -> Iterator[None]:
    """Convert SIGTERM in the block to SystemExit, which closes all open blocks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        sys.stderr.write("terminated\n")
        raise SystemExit(EXIT_CODES[signal.SIGTERM])

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_interruptibly(call: Callable[[], T], seconds: float = math.inf) -> T:
    """Return the result of a long call into code that Python signals cannot interrupt.

    It runs in a daemon thread, which Ctrl-C, or a TimeoutError after ``seconds``, leaves running.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again below
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(None if math.isinf(seconds) else seconds)
