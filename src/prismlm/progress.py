"""How long work reports on itself without printing: the caller brings the reporter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Task(Protocol):
    """One piece of work under way."""

    def advance(self, amount: int = 1) -> None:
        """Say that ``amount`` more units are done."""
        ...

    def note(self, text: str) -> None:
        """Show a few words beside the figures; they replace the last ones."""
        ...


class Reporter(Protocol):
    """Shows work under way; the command line brings one that draws bars on stderr."""

    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> AbstractContextManager[Task]:
        """Open a task of ``total`` units (None: unknown), as a context manager."""
        ...


class Silent:
    """Shows nothing: the default reporter of every library function, and each of its tasks."""

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
