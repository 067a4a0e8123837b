"""The checks of an uncertainty signal on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from prismlm.cli.format import count
from prismlm.cli.output import console_for_reading, plain, print_head, table_of
from prismlm.instruments.channels.wording import signed
from prismlm.instruments.uncertainty_feedback import (
    CAVEAT,
    Ablation,
    AttentionProbe,
    CodeProbe,
    Hedging,
    HedgingRun,
    Mistakes,
    PrefillGap,
    UncertaintyReport,
)
from prismlm.instruments.uncertainty_feedback.verdict_words import in_points, with_interval

Shown = tuple[str, Table, str]
"""The heading of a check, its table, and what its columns are."""


def print_uncertainty_feedback(report: UncertaintyReport) -> None:
    """Print every check with its control and what it says."""
    console = console_for_reading()
    read = f"{report.texts} texts, {count(report.tokens)} tokens of {plain(report.sample)}"
    print_head(console, report.model, read, f"own codes: {report.options.signal.words}")
    for check, show in _SHOW.items():
        found = getattr(report, check)
        if found is not None:
            heading, table, note = show(found)
            console.print(heading, style="bold")
            console.print(table)
            console.print(found.verdict)
            console.print(note + "\n", style="dim")
    if report.too_short:
        console.print(f"{report.too_short} texts of fewer than 2 tokens were left out.")
    for check, reason in report.left_out.items():
        console.print(f"No {check}: {plain(reason)}")
    console.print(CAVEAT, style="dim")


def _ablation(found: Ablation) -> Shown:
    table = table_of("signal", "*nats a token", "*perplexity", "*change", "*perplexity change")
    table.add_row("own", f"{found.loss:.4f}", f"{found.perplexity:.2f}")
    for one in found.conditions:
        share = one.perplexity_change
        table.add_row(
            one.signal,
            f"{one.loss:.4f}",
            f"{one.perplexity:.2f}",
            with_interval(one.change),
            f"{signed(100 * share.value, 2)} % [{signed(100 * share.low, 2)}, "
            f"{signed(100 * share.high, 2)}]",
        )
    draws = len(found.of("shuffled").by_permutation)
    return (
        "Ablation: loss with another signal",
        table,
        "zero: nothing is added; neutral: one code for all; shuffled: the own codes, elsewhere, "
        f"{draws} permutations. Changes are paired by text, with 95 % intervals over texts.",
    )


def _prefill(found: PrefillGap) -> Shown:
    table = table_of("*passes", "*other codes", "*clearly other", "*mean distance", "*loss change")
    for one in found.gaps:
        table.add_row(
            str(one.passes),
            f"{one.differing:.1%}",
            f"{one.far:.1%}",
            f"{one.distance:.2%}",
            with_interval(one.loss_change),
        )
    return (
        "Prefill against token by token",
        table,
        f"Of {count(found.positions)} positions and {count(found.levels)} levels; clearly: off "
        "by more than 1 % of them and more than one; distances are shares of them. Rounding alone "
        f"changes a token's loss by up to {found.rounding:.1g} nats.",
    )


def _attention(found: AttentionProbe) -> Shown:
    table = table_of(
        "*layer", "*top", "*bottom", "*ρ", "*matched top", "*bottom", "*ρ", "*q", "*unfed ρ",
        "*added", gap=1,
    )  # fmt: skip
    for one in found.layers:
        table.add_row(
            str(one.layer),
            f"{one.top:.2g}",
            f"{one.bottom:.2g}",
            signed(one.unmatched, 2),
            f"{one.matched_top:.2g}",
            f"{one.matched_bottom:.2g}",
            signed(one.correlation, 3),
            f"{one.q:.2g}",
            signed(one.without, 3),
            with_interval(one.added, 2),
        )
    return (
        "Attention received, by code",
        table,
        "Mean attention from later tokens, in the top and bottom quarter of codes. matched: among "
        f"texts at the same position, {found.texts} texts of {found.length} tokens. q: of ρ within "
        "positions, corrected over layers. unfed: with the same codes where none is fed.",
    )


def _hedging(found: Hedging) -> Shown:
    table = table_of("", "*tokens", "*hedges", "*after high", "*after low", "*difference")
    runs = (("own signal", found.fed), ("none", found.bare), ("shuffled codes", found.shuffled))
    for name, run in runs:
        table.add_row(name, *_hedging_row(run))
    return (
        "Hedging words after high and low entropy",
        table,
        f"Shares of the {found.window} tokens after a step that begin a hedging word, in %, and "
        f"their differences in percentage points; temperature {found.temperature:g}.",
    )


def _hedging_row(run: HedgingRun) -> tuple[str, ...]:
    if run.difference is None or run.after_high is None or run.after_low is None:
        return str(run.tokens), str(run.hedges), "–", "–", "–"
    return (
        str(run.tokens),
        str(run.hedges),
        f"{run.after_high:.2%}",
        f"{run.after_low:.2%}",
        in_points(run.difference),
    )


def _mistakes(found: Mistakes) -> Shown:
    table = table_of("signal", "*more entropy", "*summed loss", "*first", "*last", "*back after")
    for one in found.signals:
        back = "–" if one.recovered_after is None else str(one.recovered_after)
        table.add_row(
            one.signal,
            with_interval(one.mean_entropy, 3),
            with_interval(one.summed_loss, 3),
            signed(one.loss[0], 2),
            signed(one.loss[-1], 2),
            back,
        )
    return (
        "After a planted wrong token",
        table,
        f"Nats, less those of the intact text, over {len(found.signals[0].loss)} tokens; first and "
        f"last of their losses; back within {found.tolerance:g} nats. Entropy with the own signal "
        f"{with_interval(found.entropy_against_zero, 3)} against none, "
        f"{with_interval(found.entropy_against_shuffled, 3)} against shuffled codes.",
    )


def _probe(found: CodeProbe) -> Shown:
    table = table_of("*layer", "*depth", "*R²", "*shuffled", "*unfed", "*added", "*next entropy")
    for one in found.layers:
        table.add_row(
            str(one.layer),
            f"{one.depth:.2f}",
            f"{one.code.value:.3f}",
            signed(one.shuffled.value, 3),
            signed(one.without.value, 3),
            with_interval(one.added, 3),
            signed(one.next_entropy.value, 3),
            style="bold" if one is found.peak else None,
        )
    return (
        "The code, read from hidden states",
        table,
        f"Ridge regression on {found.fitted_on} texts, R² on {found.tested_on} others. Layer 0 is "
        "the embeddings with the code's vector. unfed: the same codes where none is fed.",
    )


_SHOW: dict[str, Callable[[Any], Shown]] = {
    "ablation": _ablation,
    "prefill": _prefill,
    "attention": _attention,
    "hedging": _hedging,
    "mistakes": _mistakes,
    "probe": _probe,
}
