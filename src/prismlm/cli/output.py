"""How every command prints: JSON, tables, figures, and text that cannot drive a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len, set_cell_size
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
# A longer word is written before it ends: some scripts have no spaces.
MAX_WORD_WIDTH = 24
# Numbers that are identifiers, not counts; ``a`` and ``b`` are prototypes of two models.
IDS = ("prototype", "position", "a", "b", "trial", "layer", "seed")
SHARES = ("share", "usage", "agreement", "in_use", "recovered")
# Of names of figures, what readers see instead.
WORDS = {"ce": "cross-entropy", "fvu": "unexplained variance (FVU)"}
# Line ends, tabs, and the joiners inside emoji and Persian words.
ALLOWED_CONTROLS = "\n\t\u200c\u200d"
EIGHTHS = " ▏▎▍▌▋▊▉"


def print_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(json_text(value, indent=2))


def show(value: Any, as_json: bool, printer: Callable[[], object] | None = None) -> None:
    """Print a result as JSON, or for people, by default as :func:`print_value`."""
    if as_json:
        print_json(value)
    elif printer is None:
        print_value(value)
    else:
        printer()


def write(path: Path | None, writer: Callable[[Path], object]) -> None:
    """Write a file, and report it; None is skipped."""
    if path is not None:
        writer(path)
        report_written(path)


def write_json(path: Path | None, value: Any) -> None:
    """Write one JSON document, as :func:`write`."""
    write(path, lambda path: write_text(path, json_text(value, indent=2) + "\n"))


def report_written(*paths: Path | None) -> None:
    """Print on stderr which files were written; None is skipped."""
    for path in filter(None, paths):
        typer.echo(f"wrote {path}", err=True)


def stdout_console() -> Console:
    """Return a console on stdout without markup or emoji codes; 100 columns wide in a pipe.

    Much of the output is text of others: ``[x]`` in a name is not markup, and ``:x:`` not an emoji.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def say(*lines: str, style: str = "") -> None:
    """Print lines on stdout, wrapped at words."""
    console = stdout_console()
    for line in lines:
        console.print(sanitize(line), style=style)


def sanitize(text: str) -> str:
    """Return text that cannot drive the terminal: no escape sequences, bells, direction marks."""
    characters = marks_shown(text).replace("\r", "")
    return "".join(c if c in ALLOWED_CONTROLS or c.isprintable() else "�" for c in characters)


def token_text(token: str, width: int = TOKEN_WIDTH) -> str:
    """Return a token with visible blanks, cut to a number of columns."""
    from prismlm.corpus.pieces import visible

    text = visible(sanitize(token))
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def shorten(text: str, width: int) -> str:
    """Return a name of at most so many columns, cut in the middle: both ends tell it apart."""
    text = " ".join(sanitize(text).split())
    if cell_len(text) <= width:
        return text
    left = max(width, 2) // 2
    end = set_cell_size(text[::-1], max(width - 1 - left, 0))[::-1]
    return f"{set_cell_size(text, left).rstrip()}…{end.lstrip()}"


def bar(share: float, width: int) -> str:
    """Return a bar that fills ``share`` of so many columns."""
    full, rest = divmod(round(min(max(share, 0.0), 1.0) * width * 8), 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


class Writer:
    """Prints generated text as it arrives, with line breaks between words.

    Args:
        console: the output.
        prompt: what the text answers; printed above it, before its first word.
    """

    def __init__(self, console: Console, prompt: str | None = None) -> None:
        self._console, self._prompt = console, prompt
        self._column, self._pending = 0, ""

    def write(self, text: str, *, end: bool = False) -> None:
        """Print all complete words, and at the ``end`` the last one."""
        text = self._pending + sanitize(text).replace("\t", "    ")
        text = text if self._prompt is None else text.lstrip()
        *words, self._pending = re.split(r"(?<=\s)(?=\S)", text)
        if end or cell_len(self._pending) > MAX_WORD_WIDTH:
            words, self._pending = [*words, self._pending.rstrip() if end else self._pending], ""
        if self._prompt is not None and words:
            self._console.print(self._prompt, style="dim", end="\n\n")
            self._prompt = None
        for word in words:
            body = word.rstrip()
            if self._column and self._column + cell_len(body) > self._console.width:
                self._print("\n")
            self._print(body)
            # A terminal puts blanks that do not fit on a line of their own.
            blanks, room = word[len(body) :], max(0, self._console.width - self._column)
            self._print(blanks.lstrip(" ") if "\n" in blanks else blanks[:room])
        if end and self._column:
            self._print("\n")

    def _print(self, text: str) -> None:
        self._console.print(Text(text), end="", soft_wrap=True)
        self._column = cell_len(text.rpartition("\n")[2]) + self._column * ("\n" not in text)


def print_table(table: Table) -> None:
    """Print a table under its title, without empty columns, and its facts below.

    Headings are as narrow as their figures. Cells may be rich's ``Text``.
    """
    console = stdout_console()
    if table.title:
        console.print(sanitize(table.title), style="bold")
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    cells: list[list[Text]] = []
    for name, form in table.columns.items():
        values = [figure_at(row, name) for row in table.rows]
        if all(value is None for value in values):
            continue
        texts = [v if isinstance(v, Text) else Text(sanitize(text_of(v, form))) for v in values]
        is_text = all(isinstance(value, (str, Text, type(None))) for value in values)
        heading = name.removesuffix(".value").replace("_", " ").replace(".", " ")
        if not is_text:
            width = max(text.cell_len for text in texts)
            heading = "\n".join(wrap(heading, width, break_long_words=False))
        justify = "left" if is_text else "right"
        grid.add_column(heading, justify=justify, no_wrap=not is_text, overflow="fold")
        cells.append(texts)
    for row in zip(*cells, strict=True):
        grid.add_row(*row)
    console.print(grid)
    if table.facts:
        console.print(facts_line(table.facts), style="dim")
    console.print()


def print_rows(title: str, columns: str, rows: Sequence[Any], **facts: Any) -> None:
    """Print rows as :func:`print_table`; columns are ``name`` or ``name:format``."""
    formats = {name: form for name, _, form in (c.partition(":") for c in columns.split())}
    print_table(Table(title, formats, tuple(rows), facts))


def print_value(value: Mapping[str, Any], top: int = 20) -> None:
    """Print a JSON document: its figures, then ``top`` rows of each list of records."""
    tables = {
        name: rows
        for name, rows in value.items()
        if isinstance(rows, list) and rows and isinstance(rows[0], Mapping)
    }
    print_facts({name: figure for name, figure in value.items() if name not in tables})
    say("")
    for name, records in tables.items():
        rows = [
            {key: _cell(key, x) for key, x in record.items() if not isinstance(x, list)}
            for record in records[:top]
        ]
        more = f", {top} of {len(records)}: --json has all" if len(records) > top else ""
        title = name.replace("_", " ") + more
        print_table(Table(title, dict.fromkeys(rows[0], ""), tuple(rows)))


def _cell(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return shorten(value, CELL_WIDTH)
    return None if value is None else Text(_format(name, value), justify="right")


def print_report(report: Report) -> None:
    """Print the facts, tables and findings of a report, and why tables were left out."""
    say(report.model, style="bold")
    say(facts_line(report.facts) + "\n", style="dim")
    for table in report.tables.values():
        print_table(table)
    if report.findings:
        print_table(Table("Findings", FINDINGS, report.findings))
    say(*(f"No {name}: {reason}" for name, reason in report.left_out.items()))


def print_facts(facts: Mapping[str, Any], last: str = "") -> None:
    """Print figures one below the other, and a last line."""
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for name, value in facts.items():
        words = " ".join(WORDS.get(word, word) for word in name.split("_"))
        grid.add_row(sanitize(words), Text(_format(name, value)))
    console = stdout_console()
    console.print(grid)
    if last:
        console.print(sanitize(last), style="dim", soft_wrap=True)


def facts_line(facts: Mapping[str, Any]) -> str:
    """Return figures in one line, ``texts 64 · tokens 13.7 k``, without lists of records."""
    return " · ".join(
        f"{name.replace('_', ' ')} {_format(name, value)}"
        for name, value in facts.items()
        if not isinstance(value, (list, tuple)) or all(isinstance(x, (int, str)) for x in value)
    )


def _format(name: str, value: Any) -> str:
    """Return a figure for readers; the end of its name may be its unit."""
    value = as_json(value)
    if isinstance(value, Mapping) and {"value", "low", "high"} <= value.keys():
        value, low, high = (_format(name, value[key]) for key in ("value", "low", "high"))
        return f"{value} [{low}, {high}]"
    if isinstance(value, Mapping):
        items = {key: item for key, item in value.items() if item not in (None, [], "")}
        inner = (f"{key.replace('_', ' ')} {_format(key, item)}" for key, item in items.items())
        return f"({', '.join(inner)})" if items else "none"
    if isinstance(value, list):
        return ", ".join(_format("", item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return sanitize(str(value or "none"))
    if name.endswith("bytes"):
        return format_bytes(value)
    if name.endswith("seconds"):
        return format_duration(value)
    if isinstance(value, int):
        return str(value) if name in IDS else format_count(value)
    return text_of(value, ".1%" if name.endswith(SHARES) else ".4g")


def print_cost(cost: Cost, *, as_json: bool) -> None:
    """Print the estimate of a dry run, and that nothing was written."""
    value = cost.to_dict()
    if as_json:
        print_json(value)
        return
    basis, unknown = value.pop("basis", ""), value.pop("unknown", [])
    notes = [*(f"Not known: {item}" for item in unknown), basis, "Nothing was written."]
    print_facts(value, "\n".join(filter(None, notes)))


def format_count(value: float) -> str:
    """Return a count that is short where it is large: 950, 9,875, 12.3 k, 4.56 M, 1.20 G."""
    return f"{value:,.0f}" if abs(value) < 9999.5 else _scaled(value, ("", " k", " M", " G", " T"))


def format_bytes(value: float) -> str:
    """Return a number of bytes: 950 B, 12.3 kB, 4.56 MB, 1.20 GB."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def format_duration(seconds: float) -> str:
    """Return a duration: 4 s, 2 min 5 s, 3 h 10 min."""
    minutes, seconds = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    step, scaled = 0, float(value)
    while abs(scaled) >= 999.5 and step < len(units) - 1:
        step, scaled = step + 1, scaled / 1000
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits if step else 0}f}{units[step]}"


def print_quality(quality: HeadQuality) -> None:
    """Print how well a head stands in for the model's states."""
    say("\nThe prototypes in place of the hidden states, on held-out text", style="bold")
    print_facts(quality.to_dict() | {"gain over the mean state recovered": quality.recovered})


def report_part(kind: str, out: Path, number: int, count: int, *, as_json: bool) -> None:
    """Print which parts of an output are finished after one of them."""
    from prismlm.parts import Parts

    parts, numbers = Parts(out, count), list(range(1, count + 1))
    # Other processes may have finished in the meantime and written the output.
    done = [n + 1 for n in parts.complete()] if parts.path.is_dir() else numbers
    left = sorted(set(numbers) - set(done))
    summary = {kind: None, "shards": count, "done": done, "left": left}
    missing = ", ".join(map(str, left)) or "none"
    text = f"Part {number + 1} of {count} is done; left: {missing}."
    show(summary, as_json, lambda: typer.echo(text))
