"""Means, claims of the source and its Table 10, for ``prototype_mixer_glue.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.prototype_mixer.four_models import STEPS
from benchmarks.prototype_mixer.source_tables import NAMES

TITLES = ("CoLA", "SST-2", "MRPC", "STS-B", "RTE", "WNLI", "QQP", "QNLI", "MNLI", "MNLI-MM")
SOURCE = {"llama": 74.7, "mamba": 70.8, "deltanet": 66.9, "protot": 70.1}
"""Means of the source's Table 10."""
BAND = 2.0  # points within which two means are called on par

Row = dict[str, Any]
Rows = dict[str, Row]
"""Dev sets by title."""


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return models and their dev sets by name, the means, and what the source claims."""
    found = {one["model"].removesuffix("2"): one for one in read("prototype_mixer/glue/*.json")}
    rows: dict[str, Rows] = {
        name: {row["title"]: row for row in model["tasks"] if row["split"].startswith("dev")}
        for name, model in found.items()
    }
    shared = [title for title in TITLES if all(title in sets for sets in rows.values())]
    means = {name: by_seed(sets, shared) for name, sets in rows.items()}
    return {
        "models": found,
        "rows": rows,
        "names": NAMES,
        "shared": shared,
        "means": means,
        "scratch": {n: by_seed(sets, shared, "from_scratch").mean() for n, sets in rows.items()},
        "constant": np.mean([constant(rows["protot"][title]) for title in shared]),
        "constant_of": constant,
        "source": SOURCE,
        "tried_rates": sorted({run["learning_rate"] for run in found["protot"]["tried"]}),
        "band": BAND,
        "steps": STEPS,
        "claims": _claims(rows, means),
        "gains": {
            name: [t for t, row in sets.items() if gains(row)] for name, sets in rows.items()
        },
    }


def by_seed(rows: Rows, titles: list[str], arm: str = "fine_tuned") -> np.ndarray:
    """Return the mean over sets for each seed, in points."""
    return 100 * np.mean([rows[t][arm]["values"][rows[t]["metrics"][0]] for t in titles], axis=0)


def constant(row: Row) -> float:
    """Return what the best answer that is the same for all rows gets, in points."""
    return 100 * row["constant"][row["metrics"][0]]


def gains(row: Row) -> bool:
    """Return whether the interval lies above that of the model without its training."""
    return row["fine_tuned"]["low"] > row["from_scratch"]["high"]


def _claims(rows: dict[str, Rows], means: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """Return each claim and whether it is shown, or the opposite, in every pair of seeds."""
    own = means["protot"]
    found = [
        (f"LLaMA is above {NAMES[other]}", above(means["llama"], means[other]))
        for other in ("deltanet", "mamba", "protot")
    ]
    found += [
        (f"ProtoT is on par with {NAMES[other]}", on_par(own, means[other]))
        for other in ("deltanet", "mamba")
    ]
    order = sorted(rows, key=lambda name: -by_seed(rows[name], ["MNLI"]).mean())
    place = order.index("protot") + 1
    number = f"number {place} of {len(order)}, with intervals that overlap"
    return [*found, ("ProtoT is second on MNLI", number)]


def above(one: np.ndarray, other: np.ndarray) -> str:
    """Say whether means over seeds are above others."""
    gap = f"by {one.mean() - other.mean():+.1f} points"
    if one.min() > other.max():
        return f"shown, {gap}"
    return f"{'the opposite' if one.max() < other.min() else 'not shown'}, {gap}"


def on_par(one: np.ndarray, other: np.ndarray) -> str:
    """Say whether means over seeds are within the band."""
    gap = one.mean() - other.mean()
    if abs(gap) <= BAND:
        return f"shown, {gap:+.1f} points"
    apart = one.max() < other.min() or one.min() > other.max()
    which = f"the opposite, it is {'above' if gap > 0 else 'below'}"
    return f"{which if apart else 'not shown'}, {gap:+.1f} points"
