"""Intervals and rank correlations over SciPy, as figures that the package prints.

Nothing here depends on how many threads run or on what else is installed: ranks and their products
are exact in float64, and what is drawn comes from the seed alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rank correlation.

    Attributes:
        rho: −1 to 1.
        p: two-sided, from Student's distribution with n − 2 degrees of freedom.
        count: n.
    """

    rho: float
    p: float
    count: int


def spearman(x: np.ndarray, y: np.ndarray) -> RankCorrelation:
    """Return Spearman's ρ, Pearson's correlation of ranks, ties sharing their mean rank.

    Where all of x or all of y are alike, ρ is 0 and p is 1.

    Args:
        x, y: n ≥ 3 pairs.

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
    own, whole = (np.asarray(a, dtype=np.float64).T for a in parts)
    own, whole = (a[None] if a.ndim == 1 else a for a in (own, whole))
    signs = np.asarray(coefficients, dtype=np.float64)
    if not own.size or own.shape != whole.shape or own.shape[:1] != signs.shape:
        raise InputError(
            f"sums {list(own.T.shape)}, weights {list(whole.T.shape)} and {len(signs)} "
            "coefficients: expected [texts, C] twice, at least one text, and C of them."
        )

    def of(texts: np.ndarray) -> np.ndarray:
        found = np.zeros(texts.shape[:-1])
        for sign, s, w in zip(signs, own, whole, strict=True):
            weight = w[texts].sum(-1)
            none = np.full_like(weight, np.nan)
            found = found + sign * np.divide(s[texts].sum(-1), weight, out=none, where=weight != 0)
        return found

    return interval_of(of, own.shape[1], seed=seed)


def mean_intervals(columns: np.ndarray, *, seed: int = 0) -> list[Interval]:
    """Return the mean of each column [n, C] with its percentile interval over resampled rows.

    All columns are of the same 10,000 resamples, so that one of differences is paired by row. Many
    columns take little longer than one.
    """
    own = np.ascontiguousarray(columns.T, dtype=np.float64)
    count, random = len(columns), np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for first in range(0, RESAMPLES, CHUNK):
        some = min(CHUNK, RESAMPLES - first)
        drawn = random.integers(count, size=(some, count)) + count * np.arange(some)[:, None]
        times = np.bincount(drawn.ravel(), minlength=some * count).reshape(some, count)
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
    rows = np.arange(count)
    value = float(figure(rows))
    if count == 1 or not np.isfinite(value):
        return Interval(value, value, value)
    with warnings.catch_warnings():
        # A NaN counts for nothing here, so that SciPy need not warn of it.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        drawn = stats.bootstrap(
            (rows,),
            lambda drawn, axis: figure(drawn),
            n_resamples=RESAMPLES,
            batch=CHUNK,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).bootstrap_distribution
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(value, float(low), float(high))
