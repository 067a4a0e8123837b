"""Ending in good order on SIGTERM, so that what was being written is taken away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

TERMINATED = 143


@contextmanager
def orderly_end() -> Iterator[None]:
    """Turn SIGTERM into an exit that closes every open block, during the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        typer.echo("terminated", err=True)
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
