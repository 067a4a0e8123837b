"""prismlm inspect heads: how far attention heads look, and what at."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.inspect.corpus_to_read import CorpusToRead, Length, open_both
from prismlm.cli.options import Json, Models, Overwrite, Split, number, option
from prismlm.cli.output import console_for_reading, plain, print_head, print_json, table_of
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from prismlm.corpus.sequences import CorpusPart
    from prismlm.instruments.heads import AcrossModels, Comparison, HeadFigures, HeadReport

BLOCKS = " ▁▂▃▄▅▆▇█"
SIGNIFICANT = 0.05
SMALLEST_SHARE = 0.005
# Columns of the heads' table without its spectrum, with the gaps between them.
TAKEN = 5 + 4 + 9 + 8 + 6 + 7 + 7 + 5 + 5 + 5 + 10 * 2
# What says nothing of a head that attends everywhere alike.
REACH = ("distance", "distance_beyond_self", "entropy", "relative_entropy")
# What each figure is called, and what is said of those heads in which it is larger.
MEASURES = {
    "distance": ("mean distance", "{} heads reach further"),
    "distance_beyond_self": ("… beyond self", "{} heads reach further"),
    "entropy": ("entropy, nats", "{} heads spread wider"),
    "relative_entropy": ("… of ln visible", "{} heads spread wider"),
    "self_share": ("share on self", "{} heads see self more"),
    "near_share": ("share on 4 before", "{} heads see near more"),
    "first_share": ("share on first", "{} heads see first more"),
}


def heads(
    models: Models,
    corpus: CorpusToRead = None,
    split: Split = "heldout",
    tokens: Annotated[
        int, number("N", "Tokens to read, from all over the corpus; 0 for all.")
    ] = 20_000,
    length: Length = None,
    layer: Annotated[int | None, option("N", "Only this layer.")] = None,
    least_visible: Annotated[
        int, option("N", "Only queries that see so many tokens of their window.")
    ] = 16,
    out: Annotated[Path | None, option("FILE.csv", "Write a row a head.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Show how far each head looks and what at; signal heads beside noise heads.

    Of several models, such as seeds, it shows each one's comparison and whether they agree.
    """
    check_ending(out, ".csv")
    check_outputs(out, inputs=(*models, corpus), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.heads import across_models, head_report, write_heads

    reports: list[HeadReport] = []
    for path in models:
        model, sequences = open_both(path, corpus, split, tokens, length)
        name, layers = path.resolve().name, None if layer is None else (layer,)
        options: dict[str, Any] = {"layers": layers, "least_visible": least_visible}
        found = head_report(model, sequences, name=name, **options, progress=ConsoleReporter())
        reports.append(found)
    compared = [report.comparison for report in reports if report.comparison is not None]
    across = across_models(compared) if len(compared) > 1 else None
    if out is not None:
        write_heads(reports, out)
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        value = {
            "models": [report.to_dict() for report in reports],
            "across": None if across is None else [asdict(one) for one in across],
        }
        print_json(value)
        return
    for report in reports:
        print_heads(report, table=len(reports) == 1)
    if across is not None:
        print_across(across)


def print_heads(report: HeadReport, *, table: bool) -> None:
    """Print what each head does, and how signal heads differ from noise heads."""
    from prismlm.instruments.heads.comparison import groups_everywhere_alike

    console = console_for_reading()
    print_header(console, report.model, report.corpus)
    if table:
        _print_heads(console, report)
    if report.comparison is None:
        console.print("Its heads are of one kind, so there are no groups to compare.\n")
        return
    _print_comparison(console, report.comparison, groups_everywhere_alike(report.uses))


def print_across(found: Sequence[AcrossModels]) -> None:
    """Print each model's effects, and how many agree in sign."""
    from prismlm.instruments.channels.wording import signed

    console = console_for_reading()
    models = len(found[0].effects)
    console.print(f"Signal against noise heads in {models} models", style="bold")
    table = table_of("figure", "Cliff's δ of each model", "*above 0", "*below 0", "*sign test p")
    for one in found:
        table.add_row(
            MEASURES[one.measure][0],
            "  ".join(signed(effect, 2) for effect in one.effects),
            str(one.positive),
            str(one.negative),
            _p(one.p),
        )
    console.print(table)
    least = 2 / 2**models
    console.print(
        f"{models} models: p cannot be below {least:.2g}, whatever they show\n", style="dim"
    )


def print_header(console: Console, model: str, corpus: CorpusPart) -> None:
    """Print the model's name and what was read."""
    tokens = f"{count(corpus.positions)} tokens of " if corpus.positions else ""
    windows = f"{corpus.split}, windows of {corpus.length:,}"
    print_head(console, model, f"{tokens}{plain(corpus.name)}", windows)


def _print_heads(console: Console, report: HeadReport) -> None:
    uses = report.uses
    spectrum = console.width >= TAKEN + len(uses.bins)
    table = table_of(
        "*layer", "*head", "group", "*distance", "*beyond", "*entropy", "*of ln n", "*self",
        "*near", "*first", *(["spectrum"] if spectrum else []),
    )  # fmt: skip
    _add(table, ["", "", "uniform"], uses.uniform, spectrum=spectrum)
    last = None
    for head in uses.heads:
        if head.layer != last:
            table.add_section()
        shown = str(head.layer) if head.layer != last else ""
        last = head.layer
        _add(table, [shown, str(head.head), head.group], head, spectrum=spectrum)
    console.print(table)
    bins = " ".join(str(low) if low == high else f"{low}–{high}" for low, high in uses.bins)
    console.print(
        f"Means over {count(uses.queries)} queries that see at least {uses.least_visible} "
        "tokens of their window, n: distance in positions, and beyond self; entropy in nats and "
        "relative to ln n; shares on self, on the 4 tokens before and on the window's first. "
        f"uniform: attention alike to all that is seen. Spectrum: shares by distance {bins}, "
        "relative to the largest.\n",
        style="dim",
    )


def _add(table: Table, start: list[str], figures: HeadFigures, *, spectrum: bool) -> None:
    table.add_row(
        *start,
        *(f"{getattr(figures, name):.{1 if 'distance' in name else 2}f}" for name in MEASURES),
        *([Text(_blocks(figures.spectrum), "cyan")] if spectrum else []),
        style="dim" if start[2] == "uniform" else None,
    )


def _blocks(shares: Sequence[float]) -> str:
    top = max(shares)
    return "".join(
        BLOCKS[0] if share < SMALLEST_SHARE else BLOCKS[max(1, round(8 * share / top))]
        for share in shares
    )


def _print_comparison(
    console: Console, comparison: Sequence[Comparison], everywhere: Collection[str]
) -> None:
    from prismlm.instruments.channels.wording import signed

    console.print("Signal against noise heads", style="bold")
    table = table_of("figure", "*signal", "*noise", "*Cliff's δ", "*p", "*layers", "in words")
    for one in comparison:
        digits = 1 if one.measure.startswith("distance") else 3
        table.add_row(
            MEASURES[one.measure][0],
            f"{one.signal_median:.{digits}f}",
            f"{one.noise_median:.{digits}f}",
            signed(one.effect, 2),
            _p(one.p),
            f"{one.layers_above}:{one.layers_below}",
            in_words(one, everywhere),
        )
    console.print(table)
    first = comparison[0]
    console.print(
        f"Medians over {first.signal_heads} + {first.noise_heads} heads in each of "
        f"{len(first.layers)} layers. δ above 0: larger in signal heads. p exact, of ranks and "
        f"permutations within layers, {len(comparison)} figures and none corrected for that. "
        "layers: with δ above and below 0. These are heads of one model, not independent runs: "
        "what holds of the design takes several models.\n",
        style="dim",
    )


def in_words(one: Comparison, everywhere: Collection[str] = ()) -> str:
    """Return which heads have the larger figure, where that is clear.

    Args:
        one: the comparison.
        everywhere: groups that attend everywhere alike, of which no reach is said.
    """
    if one.p >= SIGNIFICANT or not one.effect:
        return "no clear difference"
    group = "signal" if one.effect > 0 else "noise"
    if one.measure in REACH and group in everywhere:
        return f"{group} heads attend everywhere alike"
    said = MEASURES[one.measure][1].format(group)
    # δ is of heads of one layer; the medians beside it are of all, and may lie the other way.
    opposite = (one.signal_median - one.noise_median) * one.effect < 0
    return f"within layers {said}" if opposite else said


def _p(value: float) -> str:
    return "<1e-4" if value < 1e-4 else f"{value:.2g}"
