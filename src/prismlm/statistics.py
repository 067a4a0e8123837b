"""Bootstrap intervals and rank correlations; what is drawn comes from the seed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from prismlm.errors import InputError

RESAMPLES = 10_000
# Resamples that are held at once.
CHUNK = 1000


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % percentile interval over resampled texts, or other rows.

    ``value`` is of the rows as they are; NaN where there was nothing to take it of.
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


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's ρ of n pairs, with its two-sided p by Student's distribution."""

    rho: float
    p: float
    count: int


def spearman(x: np.ndarray, y: np.ndarray) -> RankCorrelation:
    """Return Spearman's ρ of n ≥ 3 pairs; 0, with p = 1, where all of x or all of y are alike.

    Raises:
        InputError: fewer than 3 pairs, or figures that are not finite.
    """
    if x.shape != y.shape or x.ndim != 1 or len(x) < 3:
        raise InputError(f"{list(x.shape)} and {list(y.shape)} figures: expected 3 pairs or more.")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("figures to be ranked are not finite.")
    if not (np.ptp(x) and np.ptp(y)):
        return RankCorrelation(0.0, 1.0, len(x))
    found: Any = stats.spearmanr(x, y)
    return RankCorrelation(float(found.statistic), float(found.pvalue), len(x))


def bootstrap(
    sums: np.ndarray,
    weights: np.ndarray | None = None,
    coefficients: Sequence[float] = (1.0,),
    *,
    seed: int = 0,
) -> Interval:
    """Return Σ_c κ_c (Σ_i s_ic / Σ_i w_ic) with its percentile interval over resampled texts i.

    All columns c are of the same resampled texts, so that differences are paired by text; so are
    two calls with as many texts and the same seed. A resample that leaves a column without weight
    counts for nothing.

    Args:
        sums: s, [texts] or [texts, C]: of what a mean is taken, such as losses.
        weights: w, of the same shape: how much there is of it, such as tokens; None for 1 each.
        coefficients: κ [C]; (1, −1) for a difference.
        seed: of the resamples.

    Raises:
        InputError: no text, or shapes that do not go together.
    """
    parts = [sums, np.ones_like(sums) if weights is None else weights]
    s, w = (np.asarray(a, dtype=np.float64) for a in parts)
    s, w = (a[:, None] if a.ndim == 1 else a for a in (s, w))
    signs = np.asarray(coefficients, dtype=np.float64)
    if not s.size or s.shape != w.shape or s.shape[1:] != signs.shape:
        raise InputError(
            f"sums {list(s.shape)}, weights {list(w.shape)} and {len(signs)} coefficients: "
            "expected [texts, C] twice, at least one text, and C of them."
        )

    def of(texts: np.ndarray) -> np.ndarray:
        found = np.zeros(texts.shape[:-1])
        for sign, own, whole in zip(signs, s.T, w.T, strict=True):
            weight = whole[texts].sum(-1)
            none = np.full_like(weight, np.nan)
            found = found + sign * np.divide(
                own[texts].sum(-1), weight, out=none, where=weight != 0
            )
        return found

    return interval_of(of, len(s), seed=seed)


def mean_intervals(columns: np.ndarray, *, seed: int = 0) -> list[Interval]:
    """Return the mean of each column [n, C] with its percentile interval over resampled rows.

    All columns are of the same resamples, so that one of differences is paired by row. Many columns
    take little longer than one.
    """
    own, count = np.ascontiguousarray(columns.T, dtype=np.float64), len(columns)
    found: list[np.ndarray] = []
    for drawn in _resamples(count, seed):
        places = drawn + count * np.arange(len(drawn))[:, None]
        times = np.bincount(places.ravel(), minlength=drawn.size).reshape(drawn.shape)
        # Not a product of matrices, whose sums depend on threads.
        found.append(np.einsum("rn,cn->rc", times.astype(np.float64), own) / count)
    low, high = np.percentile(np.concatenate(found), [2.5, 97.5], axis=0)
    return [Interval(*map(float, one)) for one in zip(own.mean(-1), low, high, strict=True)]


def interval_of(
    figure: Callable[[np.ndarray], np.ndarray], count: int, *, seed: int = 0
) -> Interval:
    """Return a figure of n rows with its percentile interval over 10,000 resamples of them.

    Args:
        figure: row numbers [..., n] to figures [...]; NaN counts for nothing.
        count: n, at least 1.
        seed: of the resamples.
    """
    value = float(figure(np.arange(count)))
    if count == 1 or not np.isfinite(value):
        return Interval(value, value, value)
    drawn = np.concatenate([figure(rows) for rows in _resamples(count, seed)])
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _resamples(count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of all resamples [up to CHUNK, n]."""
    random = np.random.default_rng(seed)
    for first in range(0, RESAMPLES, CHUNK):
        yield random.integers(count, size=(min(CHUNK, RESAMPLES - first), count))
