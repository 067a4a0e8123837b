"""Themes of units on a terminal."""

from __future__ import annotations

from rich.text import Text

from prismlm.cli.output import bar, console_for_reading, fit, plain, table_of
from prismlm.instruments.themes.report import FIGURES, ThemeReport

SHOWN = 40
BAR = 16
THEME_WIDTH, NAME_WIDTH = 48, 22


def print_themes(report: ThemeReport) -> None:
    """Print the three figures as bars beside random sequences, then units with their themes."""
    console = console_for_reading()
    judged = [one for one in report.judged if one is not None]
    head = (
        f"{len(judged):,} {report.of} of {plain(report.model)} on {plain(report.corpus)}, "
        f"{report.split}, judged by {plain(report.judge)}"
    )
    console.print(head, style="bold")
    documents = sum(report.documents) / len(report.documents)
    said = f"The ten sequences of each are of {documents:.1f} documents in the mean."
    console.print(said, style="dim")
    if report.left_out:
        console.print(f"{report.left_out:,} more have fewer than ten sequences.", style="dim")
    for figure in FIGURES:
        one = report.difference(figure)
        own, chance = (report.values(figure, random=flag) for flag in (False, True))
        console.print()
        said = f"{figure}: mean {own.mean():.1f}, of ten random sequences {chance.mean():.1f}"
        if len(own) > 1:
            said += f"; difference {one.value:+.1f} ({one.low:+.1f} to {one.high:+.1f})"
        console.print(said)
        table = table_of("*", report.of, "*", "random", "*")
        counts = [report.histogram(figure, random=flag) for flag in (False, True)]
        for value, pair in enumerate(zip(*counts, strict=True), 1):
            cells = [Text(str(value))]
            for count, every in zip(pair, (own, chance), strict=True):
                cells += [Text(bar(count / len(every), BAR)), Text(str(count), "dim")]
            table.add_row(*cells)
        console.print(table)
    console.print()
    table = table_of("unit", "*dis.", "*cov.", "*themes", "theme")
    rows = zip(report.names, report.judged, strict=True)
    shown = [(name, one) for name, one in rows if one is not None][:SHOWN]
    for name, one in shown:
        figures = (str(getattr(one, figure)) for figure in FIGURES)
        theme = Text(fit(plain(one.theme), THEME_WIDTH))
        table.add_row(fit(name, NAME_WIDTH), *figures, theme)
    console.print(table)
    if len(judged) > len(shown):
        console.print(f"… and {len(judged) - len(shown):,} more: --json has all.", style="dim")
