"""Waiting for a turn: one at a time, in the order they came, and only so many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")


class Busy(Exception):
    """As many requests wait for the model as may."""


class Line:
    """One at a time uses the model, in the order they came; the others wait, up to a number.

    Args:
        waiting: how many may wait.
    """

    def __init__(self, waiting: int) -> None:
        self._turn = asyncio.Lock()
        self._most = waiting
        self.waiting = 0

    @property
    def before(self) -> int:
        """How many would be served before another one."""
        return self.waiting + self._turn.locked()

    def check(self) -> None:
        """Raise Busy where nobody else may wait."""
        if self.waiting >= self._most:
            raise Busy

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, in a thread of its own, once it is its turn.

        Raises:
            Busy: too many wait.
        """
        self.check()
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1
        try:
            task = asyncio.ensure_future(run_in_threadpool(work))
            try:
                return await asyncio.shield(task)
            finally:
                # A thread cannot be stopped from outside: the next in line waits for its end.
                await asyncio.wait([task])
        finally:
            self._turn.release()
