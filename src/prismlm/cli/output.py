"""What several commands print with: JSON, rows of a table, text that cannot drive a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prismlm.cli.format import count, duration, size
from prismlm.direction_marks import marks_shown
from prismlm.files import json_text

if TYPE_CHECKING:
    from prismlm.cost import Cost
    from prismlm.explain.quality import HeadQuality

WIDTH_WHERE_PIPED = 100
TOKEN_WIDTH = 14
NARROW_TOKEN_WIDTH = 10
# Line ends and tabs, and what joins the parts of one sign, as in emoji and Persian.
KEPT = "\n\t\u200c\u200d"
EIGHTHS = " ▏▎▍▌▋▊▉"


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON document."""
    typer.echo(json_text(value, indent=2))


def print_rows(rows: list[tuple[str, str]], last: str) -> None:
    """Print names and amounts, and a last line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    console = console_for_reading()
    console.print(table)
    console.print(last, style="dim", soft_wrap=True)


def quality_rows(quality: HeadQuality) -> list[tuple[str, str]]:
    """Return what prototypes alone say, and where a figure cannot be a working head's, so."""
    from prismlm.explain.summary import fits

    worse = quality.prototype_only_ce / quality.ce - 1
    recovered, explained = quality.recovered, f"{quality.explained_share:.3f}"
    if recovered is None:
        beyond = "nothing to recover: the states say no more than their mean"
    elif fits(recovered):
        beyond = f"{recovered:.1%} of what the states say beyond their mean"
    else:
        beyond = f"{recovered:,.1%}, no figure of a trained model, where 0% to 100% can be"
    if not fits(quality.explained_share):
        explained += ", no figure of a working head, where 0 to 1 can be"
    return [
        ("CE of the prototypes alone", f"{quality.prototype_only_ce:.3f}, {worse:+.1%}"),
        ("recovered", beyond),
        ("explained share", explained),
        ("FVU", f"{quality.fvu:.3f}"),
        ("agreement", f"{quality.agreement:.1%}"),
        ("in use", f"{quality.in_use:.1%}"),
    ]


def table_of(*headings: str, gap: int = 2, widths: Iterable[int] = ()) -> Table:
    """Return a table without lines; columns whose heading starts with * are of numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    for heading, width in zip_longest(headings, widths):
        name, justify = heading.lstrip("*"), "right" if heading.startswith("*") else "left"
        least = len(name) if width is None else None
        table.add_column(name, justify=justify, no_wrap=True, min_width=least, width=width)
    return table


def console_for_reading() -> Console:
    """Return a console on stdout that takes text as it is; 100 columns wide where it is piped.

    Much of what is printed is foreign: ``[x]`` in a name is no markup, and ``:x:`` no emoji.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_WHERE_PIPED
    return console


def plain(text: str) -> str:
    """Return text that cannot drive the terminal: no escape sequences, bells, direction marks."""
    letters = (letter for letter in marks_shown(text) if letter != "\r")
    return "".join(one if one in KEPT or one.isprintable() else "�" for one in letters)


def print_head(console: Console, name: str, *facts: str | Text) -> None:
    """Print a name and what is said of it in one line, and a blank one."""
    parts = [Text(plain(name), style="bold")]
    parts += [Text(fact) if isinstance(fact, str) else fact for fact in facts]
    console.print(Text(" · ", style="dim").join(parts), end="\n\n")


def fit(text: str, width: int = TOKEN_WIDTH) -> str:
    """Return a text of at most so many columns, the last an ellipsis where it was cut."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def fit_ends(text: str, width: int) -> str:
    """Return a name of at most so many columns, cut in the middle: it is told by both its ends."""
    if cell_len(text) <= width:
        return text
    left = max(width, 2) // 2
    end = set_cell_size(text[::-1], max(width - 1 - left, 0))[::-1]
    return f"{set_cell_size(text, left).rstrip()}…{end.lstrip()}"


def fit_name(name: str, width: int) -> str:
    """Return a prototype's name of at most so many columns: whole words, some of either side.

    What the text around is about goes first, then the last word of the longer side; a name of a
    word a side is cut in the middle. Names are *read, … → next, …* or the words raised, *a · b*.
    """
    if cell_len(name) > width and not name.startswith("("):
        name = name.partition(" (")[0]
    between = " · " if " · " in name else ", "
    sides = [side.split(between) for side in name.split(" → ")]
    while cell_len(shown := " → ".join(_side(side, between) for side in sides)) > width:
        longest = max(sides, key=lambda side: (len(side) > 1, cell_len(between.join(side))))
        if len(longest) == 1:
            break
        longest.pop()
    return fit_ends(shown, width)


def _side(words: Sequence[str], between: str) -> str:
    joined = between.join(words)
    return f"{joined})" if joined.startswith("(") and not joined.endswith(")") else joined


def bar(share: float, width: int) -> str:
    """Return a bar of ``share`` of so many columns, padded with spaces."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def print_cost(cost: Cost, *, as_json: bool) -> None:
    """Print what a dry run expects, what it cannot know, and that nothing was written."""
    if as_json:
        print_json(cost.to_dict())
        return
    rows = [
        (label, value)
        for name, found in cost.figures.items()
        for label, value in [_figure(name, found)]
        if label
    ]
    about = "at most" if cost.seconds is None else "about"
    seconds, disk = cost.seconds, cost.disk_bytes
    rows += [
        ("time", "not known" if seconds is None else f"about {duration(seconds)}"),
        ("memory", f"about {size(cost.memory_bytes)}"),
        ("disk", "not known" if disk is None else f"{about} {size(disk)}"),
    ]
    if cost.parts:
        console_for_reading().print(_parts(cost))
    unknown = [f"Not known: {sentence}\n" for sentence in cost.unknown]
    print_rows(rows, f"{''.join(unknown)}{cost.basis} Nothing was written.".lstrip())


def _figure(name: str, value: Any) -> tuple[str, str]:
    """Return a figure of a cost as people read it: what it is called says in which unit it is."""
    words = name.replace("_", " ")
    if isinstance(value, bool) or ("seconds" in name and value == 0):
        return "", ""
    if value is None:
        return words, "not known"
    if isinstance(value, (list, tuple)):
        return words, ", ".join(value) or "none"
    if name.endswith("_per_second"):
        return "speed", f"{count(value)} {words.removesuffix(' per second')}/s"
    if name == "seconds_per_step":
        return "time per step", f"{value * 1000:.0f} ms"
    if name == "bytes_per_token":
        return "disk per million tokens", size(1_000_000 * value)
    if name.endswith("_bytes"):
        return f"size of {words.removesuffix(' bytes')}", size(value)
    if "seconds" in name:
        return words.replace("seconds", "time"), f"about {duration(value)}"
    if isinstance(value, float) and value < 1000:
        return words, f"{value:.3g}"
    return words, value if isinstance(value, str) else count(value)


def _parts(cost: Cost) -> Table:
    table = table_of("", "", "*time", "*memory", "*disk")
    for part in cost.parts:
        there = "there" if part.figures.get("there") else part.basis
        shown = (
            "not known" if value is None else form(value) if value else "–"
            for value, form in (
                (part.seconds, duration),
                (part.memory_bytes, size),
                (part.disk_bytes, size),
            )
        )
        table.add_row(plain(part.name), there, *shown)
    return table
