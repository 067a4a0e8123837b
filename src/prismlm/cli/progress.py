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
from prismlm.cli.format import amount, duration

SECONDS_BETWEEN_LINES = 10.0
_FIGURES_WIDTH = 68  # of the description and the figures on a terminal


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
        if self._console.is_terminal:
            with _bars(self._console) as bars:
                bar = _Bar(bars, description, total, unit)
                yield bar
                bar.finish()
        else:
            lines = _Lines(description, total, unit)
            yield lines
            lines.finish()


class _Bar:
    def __init__(self, bars: Progress, description: str, total: int | None, unit: str) -> None:
        self._bars = bars
        self._task = bars.add_task(description, total=total, unit=unit, note="")

    def advance(self, amount: int = 1) -> None:
        self._bars.advance(self._task, amount)

    def note(self, text: str) -> None:
        self._bars.update(self._task, note=text)

    def finish(self) -> None:
        done = self._bars.tasks[self._task].completed
        # Work of unknown size is complete now; work that counted nothing shows its time alone.
        self._bars.update(self._task, total=done or 1, completed=done or 1)
        if not done:
            self._bars.update(self._task, unit=None)


class _Lines:
    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._done, self._note = 0, ""
        self._began = self._printed = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        if time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            figures = _figures(self._done, self._total, self._unit, self._elapsed())
            self._print(f"{figures} · {self._note}" if self._note else figures)

    def note(self, text: str) -> None:
        self._note = text

    def finish(self) -> None:
        took = f"done in {duration(self._elapsed())}"
        done = f"{amount(self._done, self._unit)}, " if self._done else ""
        self._print(done + took)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _print(self, text: str) -> None:
        typer.echo(f"{self._description}: {text}", err=True)


def _bars(console: Console) -> Progress:
    width = max(8, min(30, console.width - _FIGURES_WIDTH))
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description:<22}", markup=False),
        BarColumn(width, complete_style="cyan", finished_style="green"),
        _Figures(),
        console=console,
    )


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        unit: str | None = task.fields["unit"]
        elapsed = (task.finished_time if task.finished else task.elapsed) or 0.0
        if unit is None:
            return Text(duration(elapsed), style="dim", no_wrap=True)
        total = None if task.total is None else int(task.total)
        figures = _figures(int(task.completed), total, unit, elapsed)
        note = task.fields["note"]
        return Text(f"{figures}\n{note}" if note else figures, style="dim", no_wrap=True)


def _figures(done: int, total: int | None, unit: str, elapsed: float) -> str:
    if not done:
        return duration(elapsed)
    rate = done / max(elapsed, 1e-9)
    speed = f"{amount(rate, unit)}/s"
    if total is None or done >= total:
        return f"{amount(done, unit)} · {speed} · {duration(elapsed)}"
    left = f"{duration((total - done) / rate)} left"
    return f"{amount(done, unit)} of {amount(total, unit)} · {speed} · {left}"
