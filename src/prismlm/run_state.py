"""Long work on one place: who is writing there, what it was begun with, and how it ends early."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from prismlm.errors import FormatError, InputError, Interrupted, changes
from prismlm.files import keep_json, read_json, remove_left_behind

LOCK_FILE = ".lock"
RUN_FILE = "run.json"
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# What a wait wakes up for at the latest: a signal that came to another thread.
WAIT_SECONDS = 0.2

T = TypeVar("T")


@contextmanager
def writing(
    path: str | os.PathLike[str], *, within: bool = False, wait: bool = False
) -> Iterator[None]:
    """Keep other processes that ask for it from writing to ``path`` during the block.

    The kernel gives the lock back however the process ends. What one that was killed left
    half-written is removed, and at the end so are directories that were made for the lock alone.

    Args:
        path: a file or directory; it need not be there.
        within: it is a directory that grows, which the lock and what is half-written lie in;
            otherwise it appears whole, and they lie beside it.
        wait: until no other process writes to it, instead of raising.

    Raises:
        InputError: another process writes to it, or its place cannot be written to.
    """
    target = Path(path) if Path(path).name else Path(path).absolute()
    if not target.name:
        raise InputError(f"{path} is no place for what is written: name a file or directory.")
    lock = target / LOCK_FILE if within else target.with_name(f".{target.name}.lock")
    place = lock.parent
    with ExitStack() as held:
        try:
            made = [one for one in (place, *place.parents) if not one.exists()]
            place.mkdir(parents=True, exist_ok=True)
            descriptor = _locked(lock, wait)
        except BlockingIOError as error:
            raise InputError(
                f"{target} is being written to by another process, {error}. Wait until it has "
                "ended, or choose another place."
            ) from None
        except OSError as error:
            raise InputError(f"cannot write to {place} ({error}). Choose another.") from error
        held.callback(os.close, descriptor)
        for one in reversed(made):
            held.callback(_remove_empty, one)
        held.callback(lock.unlink, missing_ok=True)
        remove_left_behind(target, within=within)
        yield


def _locked(path: Path, wait: bool) -> int:
    """Return the descriptor of a lock file that is ours; BlockingIOError names who has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever held the lock before may have removed the file in between.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
        except FileNotFoundError:  # removed: there is a new one to be opened
            pass
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise BlockingIOError(holder) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def check_same(what: str, before: Mapping[str, Any], now: Mapping[str, Any], way_out: str) -> None:
    """Check that work is resumed with what it was begun with.

    Args:
        what: the beginning of the error: "DIR was begun with another corpus".
        before: what it was begun with.
        now: what it is to be resumed with.
        way_out: what else to do than to put things back, as sentences.

    Raises:
        InputError: they differ; it names every difference.
    """
    changed = changes(dict(before), dict(now))
    if changed:
        raise InputError(f"{what} ({'; '.join(changed)}). {way_out}")


def read_note(path: Path, directory: Path, **expected: Any) -> dict[str, Any]:
    """Return what was noted of work under way, which was written with what is ``expected``.

    Raises:
        FormatError: it is damaged, or of another version; to start anew, remove ``directory``.
    """
    found = read_json(path)
    if not isinstance(found, dict) or any(found.get(k) != v for k, v in expected.items()):
        raise FormatError(
            f"{path} is of another version or damaged: remove {directory} to start anew."
        )
    return found


def begin(directory: Path, run: Mapping[str, Any], *, made: bool) -> None:
    """Note in ``run.json`` what is made in a directory, or check that it is what was begun there.

    Args:
        directory: that everything is kept in.
        run: JSON values, ``format_version`` among them.
        made: whether anything is there; a finished run does not constrain a new one.

    Raises:
        InputError: runs of something else are there; it names every difference.
        FormatError: the note is damaged.
    """
    path = directory / RUN_FILE
    if not made or not path.is_file():
        keep_json(path, run)
        return
    way_out = "Resume that one, write elsewhere with --out, or remove it."
    check_same(
        f"{directory} holds runs of something else", read_note(path, directory), run, way_out
    )


class Interrupts:
    """Notes signals during the block; the work stops itself between two steps.

    A signal is answered with a line on stderr. A second one, and any while ``now`` is set, ends
    the work where it is. Handlers that are not Python's own are left alone, as is everything
    outside of the main thread.

    Args:
        rest: says in sentences what is kept and how to resume.
        numbers: the signals.

    Attributes:
        received: the signal that came.
        now: raise at once, because everything is saved.
    """

    def __init__(
        self,
        rest: Callable[[], str] = lambda: "",
        numbers: tuple[signal.Signals, ...] = tuple(EXIT_CODES),
    ) -> None:
        self.received: signal.Signals | None = None
        self.now = False
        self._rest, self._numbers = rest, numbers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received is not None and exception[0] is None:
            # It came in the last step: what follows must not begin.
            self.stop()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = signal.Signals(number)
        if again or self.now:
            self.stop()
        # Not print: the signal may have come while it holds the lock of the stream.
        os.write(2, b"\nstopping after this step, to save it; a second time stops at once\n")

    def stop(self) -> None:
        """Raise Interrupted, which ends the work and says what is kept."""
        assert self.received is not None
        raise Interrupted(self._rest(), EXIT_CODES[self.received])


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """Say of Ctrl-C during the block what is kept, and how to resume."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as stop:
        raise Interrupted(f"{kept()} Run the same command again to resume.") from stop


@contextmanager
def orderly_end() -> Iterator[None]:
    """Turn SIGTERM into an exit that closes every open block, during the block."""
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


def answering(call: Callable[[], T], seconds: float = math.inf) -> T:
    """Return what a call returns that is long in code which Python's signals cannot end.

    It runs in a thread, while this one waits: Ctrl-C leaves it behind, to end with the process.

    Raises:
        TimeoutError: it took longer than ``seconds``, and was left behind as well.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # raised again where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive():
        thread.join(WAIT_SECONDS)
        if thread.is_alive() and time.monotonic() > until:
            raise TimeoutError
    if failed:
        raise failed[0]
    return found[0]
