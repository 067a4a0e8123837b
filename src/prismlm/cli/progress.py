"""Progress on stderr: bars on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from prismlm import progress
from prismlm.cli.output import format_amount, format_duration

SECONDS_BETWEEN_LINES = 10.0
FIGURES_WIDTH = 68  # columns for the description and the figures on a terminal


def spinner(description: str) -> AbstractContextManager[object]:
    """Show on a terminal that work of unknown length is under way."""
    return Console(stderr=True).status(f"{description} …")


class ConsoleReporter:
    """Shows every task on stderr with its progress, speed and remaining time."""

    @contextmanager
    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> Iterator[progress.Task]:
        """Open a task of ``total`` units (None: unknown), as a context manager."""
        console, task = Console(stderr=True), _Task(description, total, unit)
        if not console.is_terminal:
            yield task
            task.print_summary()
            return
        bar = BarColumn(
            max(8, min(30, console.width - FIGURES_WIDTH)),
            complete_style="cyan",
            finished_style="green",
        )
        name = TextColumn("{task.description:<22}", markup=False)
        columns = (SpinnerColumn(finished_text="[green]✓[/]"), name, bar, _Figures())
        with Progress(*columns, console=console) as task.bars:
            number = task.bars.add_task(description, total=total, task=task)
            yield task
            # A task of unknown size, or that counted nothing, is complete now.
            done = task.done or 1
            task.total = task.done
            task.bars.update(number, total=done, completed=done)


class _Task:
    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.bars: Progress | None = None
        self.done, self._note = 0, ""
        self._start = self._last_line = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        if self.bars is not None:
            self.bars.advance(self.bars.task_ids[0], amount)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            typer.echo(f"{self.description}: {self.figures(' · ')}", err=True)

    def note(self, text: str) -> None:
        self._note = text

    def figures(self, separator: str) -> str:
        elapsed = time.monotonic() - self._start
        figures = [format_duration(elapsed)]
        if self.done:
            done, rate = format_amount(self.done, self.unit), self.done / max(elapsed, 1e-9)
            if self.total is not None and self.done < self.total:
                done += f" of {format_amount(self.total, self.unit)}"
                figures = [f"{format_duration((self.total - self.done) / rate)} left"]
            figures = [done, f"{format_amount(rate, self.unit)}/s", *figures]
        return separator.join(filter(None, (" · ".join(figures), self._note)))

    def print_summary(self) -> None:
        done = f"{format_amount(self.done, self.unit)}, " if self.done else ""
        seconds = format_duration(time.monotonic() - self._start)
        typer.echo(f"{self.description}: {done}done in {seconds}", err=True)


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["task"].figures("\n"), style="dim", no_wrap=True)
