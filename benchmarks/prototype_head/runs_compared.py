"""Runs of the prototype head by method and seed, and their figures with intervals over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

# Two-sided 95 % points of Student's t by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
WHAT = {
    "default": "**default**: detached, placed half way, KL",
    "default-all": "trained on every position, not a third",
    "default-quarter": "on a quarter",
    "default-eighth": "on an eighth",
    "default-early": "on a quarter, placed at step 200",
    "default-sampled": "on a quarter, placed on random states",
    "default-revived": "on a quarter, unused prototypes revived",
    "default-annealed": "on a quarter, k from 64 to 16",
    "default-ce": "on a quarter, labels instead of the model's prediction",
    "detached": "the source's losses × 0.1, detached",
    "light": "the source's losses × 0.1, into the model",
    "light-kl": "the same with the KL",
    "constant": "the source's losses × 0.1, constant",
    "warmed-up": "the source's losses, placed, rising to 1",
    "source": "the source's losses from step 0, random prototypes",
    "source-literal": "the same, read literally",
}


@dataclass(frozen=True)
class Figure:
    """A mean over seeds with half the width of its 95 % interval; no interval for one seed."""

    mean: float
    half: float | None

    def show(self, digits: int, unit: str = "") -> str:
        """Return it as text."""
        if self.half is None:
            return f"{self.mean:.{digits}f}{unit}"
        return f"{self.mean:.{digits}f} ± {self.half:.{digits}f}{unit}"


def figure(values: list[float]) -> Figure:
    """Return mean and interval."""
    if len(values) < 2:
        return Figure(values[0], None)
    half = STUDENT[len(values) - 1] * stdev(values) / len(values) ** 0.5
    return Figure(fmean(values), half)


def seed_of(run: dict[str, Any]) -> int:
    """Return a run's seed."""
    return run["settings"]["seed"]


def plain_ce(runs: list[dict[str, Any]]) -> dict[int, float]:
    """Return the plain model's CE by seed: detached runs have bit for bit the same model."""
    return {seed_of(r): r["quality"]["ce"] for r in of_kind(runs, "method") if detached(r)}


def detached(run: dict[str, Any]) -> bool:
    """Say whether a run's model is the plain one."""
    return run["settings"]["head"]["detach"]


def of_kind(runs: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the runs of one part of the benchmark."""
    return [run for run in runs if run["kind"] == kind]


def methods(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of every method that was run, in the order of the page."""
    found = of_kind(runs, "method")
    by_name = {name: [run for run in found if run["name"] == name] for name in WHAT}
    return {name: group for name, group in by_name.items() if group}


def over_plain(run: dict[str, Any], plain: dict[int, float], key: str) -> float:
    """Return how far a cross-entropy is above the plain model's of the same seed, in percent."""
    base = plain[seed_of(run)]
    return 100 * (run["quality"][key] / base - 1)


def random_states(group: list[dict[str, Any]], plain: dict[int, float]) -> Figure:
    """Return how far the control's prototype-only CE is above the plain model's CE, in percent."""
    return figure(
        [100 * (r["control"]["prototype_only_ce"] / plain[seed_of(r)] - 1) for r in group]
    )


def quality_cells(group: list[dict[str, Any]]) -> list[str]:
    """Return the figures that every table shows."""
    digits = {"explained_share": 3, "fvu": 3, "agreement": 3, "in_use": 3, "usage_perplexity": 0}
    return [
        figure([run["quality"][key] for run in group]).show(places)
        for key, places in digits.items()
    ]
