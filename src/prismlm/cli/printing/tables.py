"""Results of instruments on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.output import console_for_reading, plain, print_head
from prismlm.instruments.results import (
    FINDINGS,
    Report,
    Row,
    Table,
    as_json,
    figure_at,
    text_of,
)


def print_report(report: Report) -> None:
    """Print what was read, every table, what the tables amount to, and what was left out."""
    console = console_for_reading()
    print_head(console, report.model)
    console.print(_facts(report.facts) + "\n", style="dim")
    for table in report.tables.values():
        show(console, table)
    if report.findings:
        show(console, Table("Findings", FINDINGS, report.findings))
    for name, reason in report.left_out.items():
        console.print(f"No {name}: {plain(reason)}")


def show(console: Console, table: Table) -> None:
    """Print a table under its title, without the columns that hold nothing, and its facts.

    Headings are as narrow as the figures below them; texts break at spaces where there is no room.
    """
    if table.title:
        console.print(plain(table.title), style="bold")
    columns = {name: [figure_at(row, name) for row in table.rows] for name in table.columns}
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    cells: list[list[str]] = []
    for name, found in columns.items():
        if all(value is None for value in found):
            continue
        cells.append([plain(text_of(value, table.columns[name])) for value in found])
        text = all(isinstance(value, str) for value in found)
        heading = name.removesuffix(".value").replace("_", " ").replace(".", " ")
        if not text:
            heading = "\n".join(
                wrap(heading, max(map(cell_len, cells[-1])), break_long_words=False)
            )
        grid.add_column(
            heading, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    for row in zip(*cells, strict=True):
        grid.add_row(*map(Text, row))
    console.print(grid)
    if table.facts:
        console.print(_facts(table.facts), style="dim")
    console.print()


def _facts(facts: Row) -> str:
    """Return figures in one line: ``texts 64 · tokens 13.7 k``; without long lists of them."""
    return " · ".join(
        f"{name.replace('_', ' ')} {_fact(value)}"
        for name, value in facts.items()
        if not isinstance(value, (list, tuple)) or all(isinstance(x, (int, str)) for x in value)
    )


def _fact(value: Any) -> str:
    found = as_json(value)
    if isinstance(found, Mapping):
        return (
            "("
            + ", ".join(f"{name.replace('_', ' ')} {_fact(inner)}" for name, inner in found.items())
            + ")"
        )
    if isinstance(found, list):
        return ", ".join(map(_fact, found)) or "none"
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, int):
        return count(found)
    return text_of(found, ".4g") if isinstance(found, float) else plain(str(found or "none"))
