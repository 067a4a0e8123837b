"""Paired differences over seeds, with Student's interval corrected for the rows of a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.05
HOW = (
    "Intervals: 95 %, Student's t of paired differences over seeds, Bonferroni-corrected within a "
    "table; bold ones exclude 0."
)
Figures = dict[int, float]
"""A figure by seed."""


class Difference(NamedTuple):
    """The mean of paired differences, and its interval if there is more than one seed."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def sign(self) -> int:
        """The sign of a difference whose interval excludes 0, else 0."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0

    def shown(self, form: str = "+.4f") -> str:
        """Return the mean with its interval, bold where that excludes 0."""
        if self.seeds == 1:
            return f"{self.mean:{form}} (1 seed)"
        text = f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"
        return f"**{text}**" if self.sign else text


def differences(pairs: Sequence[tuple[Figures, Figures]]) -> list[Difference]:
    """Return first less second of each pair, corrected for the pairs with more than one seed."""
    paired = [[a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())] for a, b in pairs]
    level = LEVEL / max(1, sum(len(values) > 1 for values in paired))
    return [
        Difference(
            statistics.fmean(values),
            *(interval(values, level) if len(values) > 1 else (-math.inf, math.inf)),
            len(values),
        )
        for values in paired
    ]


def interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Return Student's interval of a mean of at least two, at a two-sided level."""
    count = len(differences)
    t = float(stats.t.isf(level / 2, count - 1))
    half = t * statistics.stdev(differences) / math.sqrt(count)
    mean = statistics.fmean(differences)
    return mean - half, mean + half


def spread(values: Iterable[float], form: str = ".3g") -> str:
    """Return the mean with the least and the most, or a dash for none."""
    numbers = list(values)
    if not numbers:
        return "–"
    middle, least, most = (format(f(numbers), form) for f in (statistics.fmean, min, max))
    return middle if len(numbers) == 1 else f"{middle} ({least} to {most})"


def paired(left: Any, right: Any) -> dict[str, float]:
    """Return the mean of the differences, and its standard error."""
    return mean_with_error(np.array(left) - np.array(right))


def mean_with_error(values: np.ndarray) -> dict[str, float]:
    """Return the mean and its standard error."""
    error = float(values.std(ddof=1) / np.sqrt(len(values)))
    return {"mean": float(values.mean()), "error": error}
