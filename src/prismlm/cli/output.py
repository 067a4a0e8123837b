"""How every command prints: JSON, tables, facts, and text that cannot drive a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from prismlm.direction_marks import marks_shown
from prismlm.files import json_text
from prismlm.outputs import write_text
from prismlm.probes.results import FINDINGS, Report, Table, as_json, figure_at, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from prismlm.cost import Cost
    from prismlm.explain.quality import HeadQuality

PIPE_WIDTH = 100
TOKEN_WIDTH, CELL_WIDTH = 14, 32
# Columns of what is written before its word ends: some scripts have no spaces.
LONGEST_WORD = 24
# Numbers that say which one, not how many; ``a`` and ``b`` are prototypes of two models.
IDS = ("prototype", "position", "a", "b", "b_by_contexts", "trial", "layer", "seed")
# Line ends and tabs, and what joins the parts of one sign, as in emoji and Persian.
KEPT = "\n\t\u200c\u200d"
EIGHTHS = " ▏▎▍▌▋▊▉"


def print_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(json_text(value, indent=2))


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document, and say so."""
    write_text(path, json_text(value, indent=2) + "\n")
    wrote(path)


def wrote(*paths: Path | None) -> None:
    """Say on stderr which files were written; None is passed over."""
    for path in paths:
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


def console_for_reading() -> Console:
    """Return a console on stdout that takes text as it is; 100 columns wide where it is piped.

    Much of what is printed is foreign: ``[x]`` in a name is no markup, and ``:x:`` no emoji.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def say(*lines: str, style: str = "") -> None:
    """Print lines on stdout, wrapped at words."""
    console = console_for_reading()
    for line in lines:
        console.print(plain(line), style=style)


def plain(text: str) -> str:
    """Return text that cannot drive the terminal: no escape sequences, bells, direction marks."""
    letters = (letter for letter in marks_shown(text) if letter != "\r")
    return "".join(one if one in KEPT or one.isprintable() else "�" for one in letters)


def token_text(token: str, width: int = TOKEN_WIDTH) -> str:
    """Return a token with its blanks made visible, cut to so many columns."""
    from prismlm.corpus.pieces import visible

    return fit(visible(plain(token)), width)


def fit(text: str, width: int = TOKEN_WIDTH) -> str:
    """Return a text of at most so many columns, the last an ellipsis where it was cut."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def fit_ends(text: str, width: int) -> str:
    """Return a name of at most so many columns, cut in the middle: both ends tell it apart."""
    text = " ".join(plain(text).split())
    if cell_len(text) <= width:
        return text
    left = max(width, 2) // 2
    end = set_cell_size(text[::-1], max(width - 1 - left, 0))[::-1]
    return f"{set_cell_size(text, left).rstrip()}…{end.lstrip()}"


def bar(share: float, width: int) -> str:
    """Return a bar of ``share`` of so many columns."""
    full, rest = divmod(round(min(max(share, 0.0), 1.0) * width * 8), 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


class Writer:
    """Writes words as they come and breaks lines between them."""

    def __init__(self, console: Console) -> None:
        self._console, self._column, self._waiting = console, 0, ""

    def write(self, text: str) -> None:
        """Write what is whole words by now."""
        self._waiting += plain(text).replace("\t", "    ")
        *words, self._waiting = re.split(r"(?<=\s)(?=\S)", self._waiting)
        if cell_len(self._waiting) > LONGEST_WORD:
            words, self._waiting = [*words, self._waiting], ""
        for word in words:
            self._put(word)

    def end(self) -> None:
        """Write the last word, and end its line."""
        self._put(self._waiting.rstrip())
        self._waiting = ""
        if self._column:
            self._out("\n")

    def _put(self, word: str) -> None:
        body, width = word.rstrip(), self._console.width
        if self._column and self._column + cell_len(body) > width:
            self._out("\n")
        for part in chop_cells(body, width):
            self._out(part)
        blank = word[len(body) :]
        self._out("\n" * blank.count("\n") or blank[: max(0, width - self._column)])

    def _out(self, text: str) -> None:
        self._console.print(Text(text), end="", soft_wrap=True)
        self._column = 0 if text.endswith("\n") else self._column + cell_len(text)


def show(table: Table, console: Console | None = None, *, cut: str = "") -> None:
    """Print a table under its title, without columns that hold nothing, and its facts.

    Headings are as narrow as the figures below them; texts wrap where there is no room.

    Args:
        table: its cells may be rich's ``Text`` as well.
        console: where to; stdout by default.
        cut: the last column, whose texts are cut where there is no room.
    """
    console = console or console_for_reading()
    if table.title:
        console.print(plain(table.title), style="bold")
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    cells: list[list[Text]] = []
    room = console.width
    for name, form in table.columns.items():
        values = [figure_at(row, name) for row in table.rows]
        if all(value is None for value in values):
            continue
        texts = [v if isinstance(v, Text) else Text(plain(text_of(v, form))) for v in values]
        is_text = all(isinstance(value, (str, Text, type(None))) for value in values)
        widest = max(text.cell_len for text in texts)
        heading = name.removesuffix(".value").replace("_", " ").replace(".", " ")
        if not is_text:
            heading = "\n".join(wrap(heading, widest, break_long_words=False))
        justify = "left" if is_text else "right"
        grid.add_column(heading, justify=justify, no_wrap=not is_text, overflow="fold")
        cells.append(texts)
        if name == cut:
            column = grid.columns[-1]
            column.no_wrap, column.overflow, column.width = True, "ellipsis", max(12, room)
        room -= max(widest, *map(cell_len, heading.split("\n"))) + 1
    for row in zip(*cells, strict=True):
        grid.add_row(*row)
    console.print(grid)
    if table.facts:
        console.print(facts_line(table.facts), style="dim")
    console.print()


def show_rows(title: str, columns: Mapping[str, str], rows: Sequence[Any], **facts: Any) -> None:
    """Print rows under named columns with their number formats, as :func:`show`."""
    show(Table(title, columns, tuple(rows), facts))


def show_value(value: Mapping[str, Any], top: int = 20) -> None:
    """Print a JSON document: its figures, then ``top`` rows of each list of records."""
    tables = {
        name: rows
        for name, rows in value.items()
        if isinstance(rows, list) and rows and isinstance(rows[0], Mapping)
    }
    print_facts({name: one for name, one in value.items() if name not in tables})
    say("")
    for name, rows in tables.items():
        shown = [
            {key: _cell(key, one) for key, one in row.items() if not isinstance(one, list)}
            for row in rows[:top]
        ]
        more = f", {len(shown)} of {len(rows)}: --json has all" if len(rows) > top else ""
        show_rows(name.replace("_", " ") + more, dict.fromkeys(shown[0], ""), shown)


def _cell(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return fit_ends(value, CELL_WIDTH)
    return None if value is None else Text(_fact(name, value), justify="right")


def print_report(report: Report) -> None:
    """Print what was read, every table, what the tables amount to, and what was left out."""
    say(report.model, style="bold")
    say(facts_line(report.facts) + "\n", style="dim")
    for table in report.tables.values():
        show(table)
    if report.findings:
        show(Table("Findings", FINDINGS, report.findings))
    say(*(f"No {name}: {reason}" for name, reason in report.left_out.items()))


def print_facts(facts: Mapping[str, Any], last: str = "") -> None:
    """Print figures one below the other, and a last line."""
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for name, value in facts.items():
        grid.add_row(plain(name.replace("_", " ")), Text(_fact(name, value)))
    console = console_for_reading()
    console.print(grid)
    if last:
        console.print(plain(last), style="dim", soft_wrap=True)


def facts_line(facts: Mapping[str, Any]) -> str:
    """Return figures in one line: ``texts 64 · tokens 13.7 k``; without long lists of them."""
    return " · ".join(
        f"{name.replace('_', ' ')} {_fact(name, value)}"
        for name, value in facts.items()
        if not isinstance(value, (list, tuple)) or all(isinstance(x, (int, str)) for x in value)
    )


def _fact(name: str, value: Any) -> str:
    """Return a figure as people read it; the end of its name may say in which unit it is."""
    value = as_json(value)
    if isinstance(value, Mapping) and {"value", "low", "high"} <= value.keys():
        value, low, high = (_fact(name, value[key]) for key in ("value", "low", "high"))
        return f"{value} [{low}, {high}]"
    if isinstance(value, Mapping):
        value = {key: one for key, one in value.items() if one not in (None, [], "")}
        inner = (f"{key.replace('_', ' ')} {_fact(key, one)}" for key, one in value.items())
        return f"({', '.join(inner)})" if value else "none"
    if isinstance(value, list):
        return ", ".join(_fact("", one) for one in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return plain(str(value or "none"))
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("seconds"):
        return duration(value)
    if isinstance(value, int):
        return str(value) if name in IDS else count(value)
    return text_of(value, ".1%" if name.endswith(("share", "usage")) else ".4g")


def print_cost(cost: Cost, *, as_json: bool) -> None:
    """Print what a dry run expects, what it cannot know, and that nothing was written."""
    value = cost.to_dict()
    if as_json:
        print_json(value)
        return
    basis, unknown = value.pop("basis", ""), value.pop("unknown", [])
    said = [*(f"Not known: {one}" for one in unknown), basis, "Nothing was written."]
    print_facts(value, "\n".join(filter(None, said)))


def count(value: float) -> str:
    """Return a count that is short where it is large: 950, 9,875, 12.3 k, 4.56 M, 1.20 G."""
    return f"{value:,.0f}" if abs(value) < 9999.5 else _scaled(value, ("", " k", " M", " G", " T"))


def size(value: float) -> str:
    """Return a number of bytes: 950 B, 12.3 kB, 4.56 MB, 1.20 GB."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def amount(value: float, unit: str) -> str:
    """Return an amount of a unit; bytes are scaled as sizes."""
    return size(value) if unit == "bytes" else f"{count(value)} {unit}"


def duration(seconds: float) -> str:
    """Return a time: 4 s, 2 min 5 s, 3 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    step, scaled = 0, float(value)
    while abs(scaled) >= 999.5 and step < len(units) - 1:
        step, scaled = step + 1, scaled / 1000
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits if step else 0}f}{units[step]}"


def quality_facts(quality: HeadQuality) -> dict[str, Any]:
    """Return what prototypes alone say."""
    recovered = "nothing to recover: the states say no more than their mean"
    if quality.recovered is not None:
        recovered = f"{quality.recovered:,.1%} of what the states say beyond their mean"
    return {
        "CE of the model": quality.ce,
        "CE of the prototypes alone": quality.prototype_only_ce,
        "recovered": recovered,
        "explained share": quality.explained_share,
        "FVU": quality.fvu,
        "agreement": f"{quality.agreement:.1%}",
        "in use": f"{quality.in_use:.1%}",
        "held-out tokens": quality.tokens,
    }
