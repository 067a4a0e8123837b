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
from prismlm.cli.output import amount, duration

SECONDS_BETWEEN_LINES = 10.0
FIGURES_WIDTH = 68  # of the description and the figures on a terminal


def waiting(what: str) -> AbstractContextManager[object]:
    """Return what shows on a terminal that something of unknown length is being done."""
    return Console(stderr=True).status(f"{what} …")


class ConsoleReporter:
    """Shows every task on stderr with what is done, how fast, and the time left."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> Iterator[progress.Task]:
        """Open a task of ``total`` units (None: unknown), as a context manager."""
        if not self._console.is_terminal:
            lines = _Lines(description, total, unit)
            yield lines
            lines.finish()
            return
        width = max(8, min(30, self._console.width - FIGURES_WIDTH))
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<22}", markup=False),
            BarColumn(width, complete_style="cyan", finished_style="green"),
            _Figures(),
        )
        with Progress(*columns, console=self._console) as bars:
            bar = _Bar(bars, description, total, unit)
            yield bar
            bar.finish()


class _Bar:
    def __init__(self, bars: Progress, description: str, total: int | None, unit: str) -> None:
        self._bars = bars
        self._task = bars.add_task(description, total=total, unit=unit, note="")

    def advance(self, amount: int = 1) -> None:
        self._bars.advance(self._task, amount)

    def note(self, text: str) -> None:
        self._bars.update(self._task, note=text)

    def finish(self) -> None:
        # Work of unknown size, or that counted nothing, is complete now.
        done = self._bars.tasks[self._task].completed or 1
        self._bars.update(self._task, total=done, completed=done)


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed = (task.finished_time if task.finished else task.elapsed) or 0.0
        total = None if task.total is None else int(task.total)
        figures = _figures(int(task.completed), total, task.fields["unit"], elapsed)
        note = task.fields["note"]
        return Text(f"{figures}\n{note}" if note else figures, style="dim", no_wrap=True)


class _Lines:
    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._done, self._note = 0, ""
        self._began = self._printed = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            figures = _figures(self._done, self._total, self._unit, now - self._began)
            self._print(f"{figures} · {self._note}" if self._note else figures)

    def note(self, text: str) -> None:
        self._note = text

    def finish(self) -> None:
        done = f"{amount(self._done, self._unit)}, " if self._done else ""
        self._print(f"{done}done in {duration(time.monotonic() - self._began)}")

    def _print(self, text: str) -> None:
        typer.echo(f"{self._description}: {text}", err=True)


def _figures(done: int, total: int | None, unit: str, elapsed: float) -> str:
    if not done:
        return duration(elapsed)
    rate = done / max(elapsed, 1e-9)
    speed = f"{amount(rate, unit)}/s"
    if total is None or done >= total:
        return f"{amount(done, unit)} · {speed} · {duration(elapsed)}"
    left = f"{duration((total - done) / rate)} left"
    return f"{amount(done, unit)} of {amount(total, unit)} · {speed} · {left}"
