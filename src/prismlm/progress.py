"""Progress of long work, through a reporter that the caller provides."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Task(Protocol):
    """A running piece of work."""

    def advance(self, amount: int = 1) -> None:
        """Add ``amount`` finished units."""
        ...

    def note(self, text: str) -> None:
        """Show a short note; it replaces the last one."""
        ...


class Reporter(Protocol):
    """Shows progress; that of the command line draws bars on stderr."""

    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> AbstractContextManager[Task]:
        """Open a task of ``total`` units (None: unknown), as a context manager."""
        ...


class Silent:
    """Shows nothing: the default reporter of every library function, and its tasks."""

    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> AbstractContextManager[Task]:
        """Open a task that is not shown."""
        return nullcontext(self)

    def advance(self, amount: int = 1) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


SILENT = Silent()
