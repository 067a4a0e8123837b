"""Means, claims of the source and its Table 10, for ``prototype_mixer_glue.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.prototype_mixer.four_models import STEPS
from benchmarks.prototype_mixer.tables import SOURCE as TABLES

TITLES = ("CoLA", "SST-2", "MRPC", "STS-B", "RTE", "WNLI", "QQP", "QNLI", "MNLI", "MNLI-MM")
NAMES = TABLES["names"]
SOURCE = {"llama": 74.7, "mamba": 70.8, "deltanet": 66.9, "protot": 70.1}
"""Means of the source's Table 10."""
BAND = 2.0  # points within which two means are called on par

Row = dict[str, Any]
Rows = dict[str, Row]
"""Dev sets by title."""


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return models and their dev sets by name, the means, and what the source claims."""
    models = {one["model"].removesuffix("2"): one for one in read("prototype_mixer/glue/*.json")}
    rows: dict[str, Rows] = {
        name: {row["title"]: row for row in model["tasks"] if row["split"].startswith("dev")}
        for name, model in models.items()
    }
    shared = [title for title in TITLES if all(title in sets for sets in rows.values())]
    means = {name: by_seed(sets, shared) for name, sets in rows.items()}
    return {
        "models": models,
        "rows": rows,
        "names": NAMES,
        "shared": shared,
        "means": means,
        "scratch": {n: by_seed(sets, shared, "from_scratch").mean() for n, sets in rows.items()},
        "constant": np.mean([constant(rows["protot"][title]) for title in shared]),
        "constant_of": constant,
        "source": SOURCE,
        "tried_rates": sorted({run["learning_rate"] for run in models["protot"]["tried"]}),
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


def _claims(rows: dict[str, Rows], means: dict[str, np.ndarray]) -> list[tuple[str, str, str]]:
    """Return each claim, whether it or its opposite is shown in all pairs of seeds, and the gap."""
    claims = [
        (f"LLaMA is above {NAMES[other]}", *compared(means["llama"], means[other]))
        for other in ("deltanet", "mamba", "protot")
    ]
    claims += [
        (f"ProtoT is on par with {NAMES[other]}", *compared(means["protot"], means[other], BAND))
        for other in ("deltanet", "mamba")
    ]
    order = sorted(rows, key=lambda name: -by_seed(rows[name], ["MNLI"]).mean())
    place = f"number {order.index('protot') + 1} of {len(order)}, with intervals that overlap"
    return [*claims, ("ProtoT is second on MNLI", "not shown", place)]


def compared(one: np.ndarray, other: np.ndarray, band: float | None = None) -> tuple[str, str]:
    """Return whether means over seeds are above others or, with a band, within it; and the gap."""
    gap = f"{one.mean() - other.mean():+.1f} points"
    above, below = one.min() > other.max(), one.max() < other.min()
    if band is None:
        return "shown" if above else "the opposite" if below else "not shown", gap
    if abs(one.mean() - other.mean()) <= band:
        return "shown", gap
    return "the opposite" if above or below else "not shown", gap
