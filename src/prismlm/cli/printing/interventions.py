"""Interventions on a terminal: what was found in each model, its cases, and the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from prismlm.cli.output import console_for_reading, plain, table_of
from prismlm.instruments.channels.effect_table import SHORT, Channel, channel_name, interval_text

if TYPE_CHECKING:
    from prismlm.instruments.channels.concepts import ConceptInModel
    from prismlm.instruments.channels.effect_table import By, EffectTable

CONTEXT_WIDTH = 34


def print_concepts(found: list[ConceptInModel], by: By) -> None:
    """Print every model's channel and table, and how many models have such a channel."""
    console = console_for_reading()
    for item in found:
        console.print(Text(plain(item.name), style="bold"))
        _print_ranked(console, item)
        for place in item.table.channels:
            _print_cases(console, item.table, place, by)
        _print_summaries(console, item.table)
        console.print()
    emerged = [item.emerges for item in found if item.emerges is not None]
    if len(emerged) > 1:
        console.print(
            f"a channel stands out beyond random words of like frequency in {sum(emerged)} of "
            f"{len(emerged)} models (p below 0.05 in each)"
        )


def _print_ranked(console: Console, item: ConceptInModel) -> None:
    found = item.found
    if found is None:
        return
    best = found.best
    words = ", ".join(f"{plain(word)} {count:,}" for word, count in found.words.items())
    console.print(f"{words} times in {found.positions:,} tokens of the training split")
    console.print(
        f"written most: {channel_name((best.layer, best.channel))}, {best.difference:+.2f} "
        f"standard deviations above its mean gate ({best.at_words:.3f} beside {best.mean:.3f})"
    )
    console.print(
        f"other channels {found.others_mean:+.2f} ± {found.others_deviation:.2f}; best channel of "
        f"random words {found.shuffled_mean:+.2f} ± {found.shuffled_deviation:.2f}, p {found.p:.3f}"
    )
    if item.heldout_difference is not None:
        console.print(
            f"the same channel on held-out text: {item.heldout_difference:+.2f}, "
            f"{item.heldout_count:,} occurrences"
        )


def _print_cases(console: Console, table: EffectTable, place: Channel, by: By) -> None:
    unit = "%" if by == "relative" else "percentage points"
    console.print()
    console.print(
        f"{channel_name(place)}, change in {unit}; {len(table.left_out)} of "
        f"{len(table.left_out) + len(table.probes)} cases left out, whose target has less than "
        f"{100 * table.options.minimum_probability:g} %"
    )
    names = [f"*{SHORT[name]}" for name in table.options.interventions]
    shown = table_of("context", "target", "*base %", *names)
    shown.columns[0].width = CONTEXT_WIDTH
    changes = [table.changes(place, name, by) for name in table.options.interventions]
    for i, probe in enumerate(table.probes):
        flat = " ".join(plain(probe.context).split())
        context = flat if len(flat) <= CONTEXT_WIDTH else f"…{flat[1 - CONTEXT_WIDTH :]}"
        shown.add_row(
            Text(context),
            Text(plain(probe.label)),
            f"{100 * float(table.baseline[i]):.2f}",
            *(f"{column[i]:+.2f}" for column in changes),
        )
    console.print(shown)


def _print_summaries(console: Console, table: EffectTable) -> None:
    console.print()
    shown = table_of(
        "channel", "intervention", "*median change", "*95 % interval", "*size",
        "*controls' sizes", "*rank", "*p",
    )  # fmt: skip
    for s in table.summaries():
        shown.add_row(
            channel_name((s.layer, s.channel)),
            SHORT[s.intervention],
            f"{s.median_relative:+.2f}",
            interval_text(s.interval),
            f"{s.median_size:.2f}",
            f"{min(s.control_sizes):.2f} to {max(s.control_sizes):.2f}",
            f"{s.rank}/{len(s.control_sizes) + 1}",
            f"{s.p_size:.3f}",
        )
    console.print(shown)
    console.print(
        Text(
            "Relative changes, in % of the probability: their median, and the median of their "
            "size beside each control's; p over cases, that it is larger",
            style="dim",
        )
    )
