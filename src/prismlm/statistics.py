"""Bootstrap intervals of means and of differences, and p-values corrected for many tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from prismlm.errors import InputError

RESAMPLES = 10_000
LEVEL = 0.95
# Resamples that are held at once.
CHUNK = 1000


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval, of a bootstrap over texts or what else it is a mean of.

    Attributes:
        value: of the texts as they are; NaN where there was nothing to take it of.
        low: the 2.5th percentile over resampled texts.
        high: the 97.5th.
    """

    value: float
    low: float
    high: float

    @property
    def above_zero(self) -> bool:
        """Whether all of it is above 0."""
        return self.low > 0

    @property
    def below_zero(self) -> bool:
        """Whether all of it is below 0."""
        return self.high < 0


def bootstrap(
    sums: np.ndarray,
    weights: np.ndarray,
    coefficients: Sequence[float] = (1.0,),
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return Σ_c κ_c (Σ_i s_ic / Σ_i w_ic) with its percentile interval over resampled texts i.

    All columns c are of the same resampled texts, so that differences are paired by text; so are
    two calls with as many texts and the same seed. A resample that leaves a column without weight
    counts for nothing.

    Args:
        sums: s, [texts] or [texts, C]: of what a mean is taken, such as losses.
        weights: w, of the same shape: how much there is of it, such as tokens.
        coefficients: κ [C]; (1, −1) for a difference.
        seed: of the resamples.
        resamples: how many.

    Raises:
        InputError: no text, or shapes that do not go together.
    """
    parts = [np.asarray(a, dtype=np.float64) for a in (sums, weights)]
    sums, weights = (a[:, None] if a.ndim == 1 else a for a in parts)
    signs = np.asarray(coefficients, dtype=np.float64)
    if not len(sums) or sums.shape != weights.shape or sums.shape[1:] != signs.shape:
        raise InputError(
            f"sums {list(sums.shape)}, weights {list(weights.shape)} and {len(signs)} "
            "coefficients: expected [texts, C] twice, at least one text, and C of them."
        )
    texts = len(sums)
    counts = _counts(texts, seed, resamples)
    found: list[np.ndarray] = []
    for first in range(0, resamples, CHUNK):
        drawn = counts[first : first + CHUNK].astype(np.float64)
        found.append(_ratios(drawn @ sums, drawn @ weights) @ signs)
    value = float(_ratios(sums.sum(0), weights.sum(0)) @ signs)
    known = np.concatenate(found)
    known = known[np.isfinite(known)]
    if not len(known):
        return Interval(value, np.nan, np.nan)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(known, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


@lru_cache(maxsize=4)
def _counts(texts: int, seed: int, resamples: int) -> np.ndarray:
    """Return how often each text is in each resample; a layer after the other asks for it."""
    rng = np.random.default_rng(seed)
    shares = np.full(texts, 1 / texts)
    parts = [
        rng.multinomial(texts, shares, size=min(CHUNK, resamples - first)).astype(np.uint16)
        for first in range(0, resamples, CHUNK)
    ]
    return np.concatenate(parts)


def _ratios(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.divide(sums, weights, out=np.full_like(sums, np.nan), where=weights != 0)


def mean_interval(values: np.ndarray, *, seed: int = 0) -> Interval:
    """Return the mean of values [n], at least one, with its percentile interval.

    Values are drawn with replacement one by one: other draws than those of :func:`bootstrap`, which
    counts how often each is drawn, and so other figures in the last digits.
    """
    generator = np.random.default_rng(seed)
    means = [
        values[generator.integers(len(values), size=(CHUNK, len(values)))].mean(1)
        for _ in range(RESAMPLES // CHUNK)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))


class PairedDifference(NamedTuple):
    """A mean difference with the 2.5th and 97.5th percentile of its bootstrap."""

    difference: float
    low: float
    high: float


def paired_difference(
    left: Mapping[int, Any], right: Mapping[int, Any], *, seed: int = 0
) -> PairedDifference:
    """Return mean(left − right) over the documents of both, with a paired bootstrap interval.

    Raises:
        InputError: the two share no document.
    """
    common = sorted(left.keys() & right.keys())
    if not common:
        raise InputError("the two results share no document, so they cannot be compared.")
    differences = np.array([float(left[row]) - float(right[row]) for row in common])
    found = mean_interval(differences, seed=seed)
    return PairedDifference(found.value, found.low, found.high)


def benjamini_hochberg(p: np.ndarray) -> np.ndarray:
    """Return q of each p [n]: the least false discovery rate at which it is found.

    q_(k) = min over l ≥ k of p_(l) n / l
    """
    order = p.argsort()
    rates = p[order] * len(p) / np.arange(1, len(p) + 1)
    least = np.empty_like(p)
    least[order] = np.minimum.accumulate(rates[::-1])[::-1].clip(max=1)
    return least
