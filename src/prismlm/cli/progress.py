"""Progress on stderr: tqdm's bars, drawn anew every ten seconds where it is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from prismlm import progress
from prismlm.cli.output import sanitize


def spinner(description: str) -> AbstractContextManager[object]:
    """Show on a terminal that work of unknown length is under way."""
    return Console(stderr=True).status(f"{description} …")


class ConsoleReporter(progress.Reporter):
    """Shows every task on stderr with its progress, speed and remaining time."""

    @contextmanager
    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> Iterator[progress.Task]:
        """Open a task of ``total`` units (None: unknown), as a context manager."""
        from tqdm import tqdm

        terminal = sys.stderr.isatty()
        with tqdm(
            desc=sanitize(description),
            total=total,
            unit="B" if unit == "bytes" else f" {unit}",
            unit_scale=total is None or total >= 10_000,
            dynamic_ncols=terminal,
            mininterval=0.1 if terminal else 10,
        ) as bar:
            note = partial(bar.set_postfix_str, refresh=False)
            task: Any = SimpleNamespace(advance=bar.update, note=note)
            yield task
