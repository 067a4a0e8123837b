"""Robustness and clamping on a terminal."""

from __future__ import annotations

from rich.text import Text

from prismlm.cli.output import console_for_reading, fit_ends, plain, table_of
from prismlm.eval.clamping import Clamping, Mediation
from prismlm.eval.robustness import MEASURES, Robustness
from prismlm.statistics import Interval

HEADINGS = ("*JS, bits", "*JS, matched", "*overlap", "*Spearman", "*same top")
NAME_WIDTH = 20


def print_robustness(found: Robustness) -> None:
    """Print each slice and model with intervals, then differences to the first model."""
    console = console_for_reading()
    table = table_of("model", "*entropy, nats", "*temperature")
    for model in found.models:
        table.add_row(_name(model.name), f"{model.entropy:.3f}", f"{model.temperature:.3f}")
    console.print(table)
    said = f"matched: at the temperatures that give a mean entropy of {found.target:.3f} nats"
    if found.left_out:
        said += f" · {found.left_out:,} pairs left out, being empty or too long for a model"
    if not found.comparable:
        said += " · vocabularies differ, so JS must not be compared between these models"
    console.print(Text(said, "dim"), soft_wrap=True)
    console.print()
    table = table_of("", *HEADINGS, gap=1)
    for part in found.slices:
        table.add_row(Text(f"{part.name}, {part.pairs} pairs", "bold"))
        for name, figures in part.models.items():
            table.add_row(_name(name), *_figures(figures))
        for (one, other), figures in part.differences.items():
            if one == found.models[0].name:
                table.add_row(_name(f"first − {other}"), *_figures(figures, sign="+"), style="dim")
    console.print(table)
    console.print(Text("In brackets 95 % intervals, bootstrapped over pairs.", "dim"))


def print_clamping(found: Clamping) -> None:
    """Print PMR of each slice beside the control."""
    console = console_for_reading()
    console.print(Text(f"{plain(found.name)}, {found.routing} clamped", style="bold"))
    table = table_of(
        "slice", "routing of", "*PMR", "*std", "*> 0", "*pooled", "*JS base", "*JS clamped", "*n"
    )
    for part in found.slices:
        table.add_row(part.name, "original", *_mediation(part.clamped))
        table.add_row("", Text("random text", "dim"), *_mediation(part.control))
    console.print(table)
    for part in found.slices:
        said = [
            f"{part.of_equal_length} pairs of equal length",
            f"{part.clamped.unmoved if part.clamped else 0} not moved",
            f"{part.unaligned} not aligned",
            f"{part.below_floor} of a JS too small to have a PMR",
        ]
        if part.gain is not None:
            gain = _interval(part.gain, "+")
            said.insert(0, f"JS with random routing minus the original's {gain}")
        console.print(Text(f"{part.name}: {', '.join(said)}", "dim"), soft_wrap=True)


def _mediation(one: Mediation | None) -> tuple[str, ...]:
    if one is None:
        return ("–",) * 6 + ("0",)
    return (
        _interval(one.mean, "+"),
        f"{one.deviation:.3f}",
        f"{one.share_positive:.3f}",
        f"{one.pooled.value:+.3f}",
        f"{one.base.value:.4f}",
        f"{one.js.value:.4f}",
        str(one.pairs),
    )


def _figures(found: dict[str, Interval], sign: str = "") -> list[str]:
    divergences = [_interval(found[key], sign) for key in MEASURES[:2]]
    return divergences + [f"{found[key].value:{sign}.3f}" for key in MEASURES[2:]]


def _interval(one: Interval, sign: str = "") -> str:
    form = f"{sign}.3f"
    return f"{one.value:{form}} ({one.low:{form}} to {one.high:{form}})"


def _name(name: str) -> Text:
    return Text(fit_ends(plain(name), NAME_WIDTH))
