"""Progress on stderr: tqdm's bars on a terminal, a line every ten seconds elsewhere."""

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

LINE = "{desc}: {n_fmt} of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left{postfix}"


def spinner(description: str) -> AbstractContextManager[object]:
    """Show on a terminal that work of unknown length is under way."""
    return Console(stderr=True).status(f"{description} …")


def _write_line(text: str) -> None:
    """Write a bar as a line, and nothing for what only moves the cursor."""
    if line := text.strip():
        sys.stderr.write(f"{line}\n")


class ConsoleReporter(progress.Reporter):
    """Shows every task on stderr with its progress, speed and remaining time."""

    @contextmanager
    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> Iterator[progress.Task]:
        """Open a task of ``total`` units (None: unknown), as a context manager."""
        from tqdm import tqdm

        options: dict[str, Any] = {"dynamic_ncols": True}
        if not sys.stderr.isatty():
            # The delay leaves out a first line that says 0.
            options = {"mininterval": 10, "delay": 1e-9, "bar_format": LINE}
            options["file"] = SimpleNamespace(write=_write_line, flush=sys.stderr.flush)
        options["unit"] = "B" if unit == "bytes" else f" {unit}"
        options["unit_scale"] = total is None or total >= 10_000
        with tqdm(desc=sanitize(description), total=total, **options) as bar:
            note = partial(bar.set_postfix_str, refresh=False)
            task: Any = SimpleNamespace(advance=bar.update, note=note)
            yield task
