"""Progress of long work, through a reporter that the caller provides."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class Task:
    """A running piece of work; this one shows nothing."""

    def advance(self, amount: int = 1) -> None:
        """Add ``amount`` finished units."""

    def note(self, text: str) -> None:
        """Show a short note; it replaces the last one."""


class Reporter(Task):
    """Shows progress; that of the command line draws bars on stderr, this one shows nothing."""

    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> AbstractContextManager[Task]:
        """Open a task of ``total`` units (None: unknown), as a context manager."""
        return nullcontext(self)


SILENT = Reporter()
