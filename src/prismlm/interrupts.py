"""SIGINT and SIGTERM while something long goes on: end at a place from which it can go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from prismlm.errors import Interrupted

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class IndexInterrupted(Interrupted):
    """A signal ended an index.

    Attributes:
        exit_code: of a command that it ends, 128 plus the signal.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupts:
    """Notes signals during the block; the work stops itself between two steps.

    A second signal, and any while ``now`` is set, ends the work where it is. Handlers that are not
    Python's own are left alone, as is everything outside of the main thread.

    Attributes:
        received: the signal that came.
        now: raise at once, because everything is saved.
    """

    def __init__(self, rest: Callable[[], str]) -> None:
        self.received: signal.Signals | None = None
        self.now = False
        self._rest = rest
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = signal.Signals(number)
        if again or self.now:
            self.stop()

    def stop(self) -> None:
        """Raise what ends the work, saying what is left of it.

        Raises:
            IndexInterrupted: always.
        """
        assert self.received is not None
        message = f"{self._rest()} The same command goes on from there."
        raise IndexInterrupted(message, EXIT_CODES[self.received])
