"""Runs of the prototype mixer's comparison by what seeds are put together over, and as text."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from benchmarks.shared.pages import table_head

NAMES = {"llama": "LLaMA", "mamba": "Mamba 2", "deltanet": "DeltaNet", "protot": "ProtoT"}
# Table 1 of the source: perplexity at 256, 512, 1,024 and 2,048.
SOURCE = {
    "llama": (78.7, 70.4, 65.3, 63.6),
    "mamba": (86.0, 78.0, 70.5, 69.5),
    "deltanet": (90.4, 76.3, 70.6, 68.9),
    "protot": (90.5, 84.8, 80.5, 81.9),
}
SOURCE_CONTEXTS = (256, 512, 1024, 2048)
Row = dict[str, Any]


class Key(NamedTuple):
    """What seeds are put together over."""

    model: str
    variant: str
    context: int
    factor: float
    steps: int


Runs = dict[Key, list[Row]]


def seeds_of(rows: list[Row]) -> int:
    """Return how many seeds runs have."""
    return len({row["seed"] for row in rows})


def average(rows: list[Row]) -> float:
    """Return their mean perplexity."""
    return statistics.mean(row["perplexity"] for row in rows)


def counted(seeds: int) -> str:
    """Return a number of seeds as text."""
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def header(first: str, contexts: list[int], *more: str) -> list[str]:
    """Return a table's first two lines: a column for each context."""
    cells = [first, *(f"{context:,}" for context in contexts), *more]
    return table_head(f"| {' | '.join(cells)} |")


def mean(rows: list[Row] | None) -> str:
    """Return the mean perplexity as text."""
    return f"{statistics.mean(row['perplexity'] for row in rows):.2f}" if rows else "–"


def cell(rows: list[Row] | None) -> str:
    """Return the mean perplexity with its range over seeds."""
    if not rows:
        return "–"
    values = [row["perplexity"] for row in rows]
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else " (one seed)"
    return mean(rows) + spread


def ratio_of(rows: list[Row] | None, others: list[Row] | None) -> str:
    """Return the ratios of perplexities of equal seeds."""
    of_seed = {row["seed"]: row["perplexity"] for row in others or []}
    found = [
        row["perplexity"] / of_seed[row["seed"]] for row in rows or [] if row["seed"] in of_seed
    ]
    if not found:
        return "–"
    spread = f", {min(found):.3f} to {max(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.median(found):.3f}{spread}"


def source(name: str, context: int) -> str:
    """Return the source's ratio to LLaMA in brackets, where it has one."""
    if context not in SOURCE_CONTEXTS:
        return ""
    at = SOURCE_CONTEXTS.index(context)
    return f" ({SOURCE[name][at] / SOURCE['llama'][at]:.3f})"


def time_of(rows: list[Row] | None) -> str:
    """Return the median of seconds by the clock and of the processor."""
    whole = [row for row in rows or [] if not row["resumed"]]
    if not whole:
        return "–"
    elapsed, processor = (
        statistics.median(row[key] for row in whole) for key in ("seconds", "processor_seconds")
    )
    return f"{elapsed:.0f} ({processor:.0f})"


def number(value: int | None) -> str:
    """Return a whole number as text."""
    return "–" if value is None else f"{value:,}"
