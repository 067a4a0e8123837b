"""How every command prints: JSON, tables, figures, progress, and text that drives no terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from prismlm.direction_marks import marks_shown
from prismlm.files import json_text
from prismlm.outputs import write_text
from prismlm.probes.results import FINDINGS, Report, Table, figure_at, text_of
from prismlm.probes.results import as_json as json_values
from prismlm.progress import SILENT, Reporter, Task

if TYPE_CHECKING:
    from prismlm.cost import Cost

PIPE_WIDTH = 100
TOKEN_WIDTH, CELL_WIDTH, MAX_ROWS = 14, 32, 20
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


def show(value: Any, as_json: bool, *parts: Any) -> None:
    """Print a result as one JSON document, or the parts of it that people read, by :func:`say`."""
    if as_json:
        typer.echo(json_text(json_values(value), indent=2))
    else:
        say(*parts or tables(value))


def say(*parts: Any) -> None:
    """Print lines, wrapped at words; tables; reports; figures by name; and iterators over these.

    What an iterator yields is printed at once, and nothing is asked of it for JSON.
    """
    for part in parts:
        if isinstance(part, Iterator):
            for one in part:
                say(one)
        elif isinstance(part, Table):
            _print_table(part)
        elif isinstance(part, Report):
            _print_report(part)
        elif isinstance(part, Mapping):
            _print_figures(part)
        else:
            line = part if isinstance(part, Text) else Text(sanitize(part))
            stdout_console().print(line, soft_wrap=bool(line.no_wrap))


def heading(line: str) -> Text:
    """Return a line in bold."""
    return Text(sanitize(line), "bold")


def dim(line: str) -> Text:
    """Return a line that matters less."""
    return Text(sanitize(line), "dim")


def warning(line: str) -> Text:
    """Return a line that must not be missed."""
    return Text(sanitize(line), "yellow")


def verbatim(line: str) -> Text:
    """Return a line to copy, such as a command, which is never wrapped."""
    return Text(sanitize(line), no_wrap=True)


def table(
    title: str, columns: str, rows: Sequence[Any], top: int | None = None, **facts: Any
) -> Table:
    """Return a table of the ``top`` rows; columns are ``name`` or ``name:format``."""
    return Table(title + _more(rows, top), columns, tuple(rows[:top]), facts)


def tables(document: Mapping[str, Any], top: int = MAX_ROWS) -> list[Any]:
    """Return the figures of a JSON document, then ``top`` rows of each list of records."""
    figures, listed = dict(document), list[Any]()
    for name, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            del figures[name]
            columns = {key: "" for key, x in value[0].items() if not isinstance(x, list)}
            rows = [{key: _cell(key, row.get(key)) for key in columns} for row in value[:top]]
            listed.append(Table(name.replace("_", " ") + _more(value, top), columns, tuple(rows)))
    return [figures, "", *listed] if listed else [figures]


def _more(rows: Sequence[Any], top: int | None) -> str:
    return "" if top is None or len(rows) <= top else f", {top} of {len(rows)}: --json has all"


def write(path: Path | None, writer: Callable[[Path], object]) -> None:
    """Write a file, and report it; None is skipped."""
    if path is not None:
        writer(path)
        report_written(path)


def write_json(path: Path | None, value: Any) -> None:
    """Write one JSON document, as :func:`write`."""
    write(path, lambda path: write_text(path, json_text(json_values(value), indent=2) + "\n"))


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


def spinner(description: str) -> AbstractContextManager[object]:
    """Show on a terminal that work of unknown length is under way."""
    return Console(stderr=True).status(f"{description} …")


def is_first_process() -> bool:
    """Return whether this process prints, of those that torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"


def progress() -> Reporter:
    """Return what shows progress on stderr, in the first of several processes alone."""
    return ConsoleReporter() if is_first_process() else SILENT


class ConsoleReporter(Reporter):
    """Shows every task on stderr with its progress, speed and remaining time.

    tqdm draws its bars anew every ten seconds where stderr is no terminal.
    """

    @contextmanager
    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> Iterator[Task]:
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


def _print_table(table: Table) -> None:
    """Print a table under its title, without empty columns, and its facts below.

    Headings are as narrow as their figures. Cells may be rich's ``Text``.
    """
    console = stdout_console()
    if table.title:
        console.print(sanitize(table.title), style="bold")
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    cells: list[list[Text]] = []
    for name, form in table.formats.items():
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


def _print_report(report: Report) -> None:
    """Print the facts, tables and findings of a report, and why tables were left out."""
    say(heading(report.model), dim(facts_line(report.facts) + "\n"), *report.tables.values())
    if report.findings:
        say(Table("Findings", FINDINGS, report.findings))
    say(*(f"No {name}: {reason}" for name, reason in report.left_out.items()))


def _print_figures(figures: Mapping[str, Any]) -> None:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for name, value in figures.items():
        words = " ".join(WORDS.get(word, word) for word in name.split("_"))
        # A row for each mapping in a mapping.
        parts = value if isinstance(value, Mapping) else {}
        nested = any(isinstance(part, Mapping) for part in parts.values())
        for key, one in parts.items() if nested else [("", value)]:
            text = _format(str(key) or name, one)
            if text.startswith("(") and isinstance(one, Mapping):
                text = text[1:-1]
            grid.add_row(sanitize(f"{words} {key}".strip().replace("_", " ")), Text(text))
    stdout_console().print(grid)


def _cell(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return shorten(value, CELL_WIDTH)
    return None if value is None else Text(_format(name, value), justify="right")


def facts_line(facts: Mapping[str, Any]) -> str:
    """Return figures in one line, ``texts 64 · tokens 13.7 k``, without lists of records."""
    return " · ".join(
        f"{name.replace('_', ' ')} {_format(name, value)}"
        for name, value in facts.items()
        if not isinstance(value, (list, tuple)) or all(isinstance(x, (int, str)) for x in value)
    )


def _format(name: str, value: Any) -> str:
    """Return a figure for readers; the end of its name may be its unit."""
    value = json_values(value)
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
    # A share of 1 is an integer in JSON; a count may have a name such as ``in_use``.
    if isinstance(value, int) and not (value == 1 and name.endswith("share")):
        return str(value) if name in IDS else format_count(value)
    return text_of(value, ".1%" if name.endswith(SHARES) else ".4g")


def show_cost(cost: Cost, as_json: bool) -> None:
    """Print the estimate of a dry run, and that nothing was written."""
    figures = cost.to_dict()
    notes = [*(f"Not known: {item}" for item in cost.unknown), cost.basis, "Nothing was written."]
    readable = {name: figures[name] for name in figures if name not in ("basis", "unknown")}
    show(figures, as_json, readable, *map(dim, filter(None, notes)))


def show_part(kind: str, out: Path, number: int, count: int, as_json: bool) -> None:
    """Print which parts of an output are finished after one of them."""
    from prismlm.parts import Parts

    parts, numbers = Parts(out, count), list(range(1, count + 1))
    # Other processes may have finished in the meantime and written the output.
    done = [n + 1 for n in parts.complete()] if parts.path.is_dir() else numbers
    left = sorted(set(numbers) - set(done))
    missing = ", ".join(map(str, left)) or "none"
    line = f"Part {number + 1} of {count} is done; left: {missing}."
    show({kind: None, "shards": count, "done": done, "left": left}, as_json, line)


def format_count(value: float) -> str:
    """Return a count that is short where it is large: 950, 9,875, 12.3 k, 4.56 M, 1.20 G."""
    return f"{value:,.0f}" if abs(value) < 9999.5 else _scaled(value)


def format_bytes(value: float) -> str:
    """Return a number of bytes: 950 B, 12.3 kB, 4.56 MB, 1.20 GB."""
    return f"{value:.0f} B" if abs(value) < 999.5 else f"{_scaled(value)}B"


def _scaled(value: float) -> str:
    """Return three digits and a unit, ``12.3 k``."""
    from tqdm import tqdm

    scaled = tqdm.format_sizeof(value)
    return f"{scaled[:-1]} {scaled[-1]}"


def format_duration(seconds: float) -> str:
    """Return a duration: 4 s, 2 min 5 s, 3 h 10 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
