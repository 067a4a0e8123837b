"""What several commands print with: JSON, rows of a table, text that cannot drive a terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH_WHERE_PIPED = 100
TOKEN_WIDTH = 14
NARROW_TOKEN_WIDTH = 10
EIGHTHS = " ▏▎▍▌▋▊▉"


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False))


def print_rows(rows: list[tuple[str, str]], last: str) -> None:
    """Print names and amounts, and a last line."""
    from rich.console import Console

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(last, style="dim"), soft_wrap=True)


def console_for_reading() -> Console:
    """Return a console on stdout; 100 columns wide where it is piped."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(highlight=False, width=WIDTH_WHERE_PIPED)
    return console


def plain(text: str) -> str:
    """Return text that cannot drive the terminal."""
    return "".join(_printable(text))


def _printable(text: str) -> Iterator[str]:
    # Text from outside must not drive the terminal: escape sequences, bells, direction marks.
    for letter in text:
        if letter in "\n\t":
            yield letter
        elif letter == "\r":
            yield ""
        else:
            yield letter if letter.isprintable() else "�"


def fit(text: str, width: int = TOKEN_WIDTH) -> str:
    """Return a text of at most so many columns, the last an ellipsis where it was cut."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def bar(share: float, width: int) -> str:
    """Return a bar of ``share`` of so many columns, padded with spaces."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)
