"""Bootstrap intervals and rank correlations; resamples depend only on the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from prismlm.errors import InputError

RESAMPLES = 10_000
# Resamples in memory at once.
CHUNK = 1000
NORMAL_QUANTILE = 1.959964  # of 97.5 %


@dataclass(frozen=True)
class Interval:
    """A statistic with its 95 % percentile interval over resampled rows, such as texts.

    ``value`` is of the original rows; NaN if it is undefined.
    """

    value: float
    low: float
    high: float

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low > 0

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high < 0


def spearman(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return Spearman's ρ of n ≥ 3 finite pairs, and its two-sided p by Student's distribution.

    ρ is 0, with p = 1, if x or y is constant.
    """
    if len(x) < 3 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError(f"{len(x)} pairs of figures to rank: expected 3 finite ones or more.")
    if not (np.ptp(x) and np.ptp(y)):
        return 0.0, 1.0
    result: Any = stats.spearmanr(x, y)
    return float(result.statistic), float(result.pvalue)


def bootstrap(
    sums: np.ndarray,
    weights: np.ndarray | None = None,
    coefficients: Sequence[float] = (1.0,),
    *,
    seed: int = 0,
) -> Interval:
    """Return Σ_c κ_c (Σ_i s_ic / Σ_i w_ic) with its percentile interval over resampled texts i.

    All columns c use the same resamples, so differences are paired by text; so are two calls with
    equally many texts and the same seed. Resamples without weight in a column are ignored.

    Args:
        sums: s, [texts] or [texts, C], such as summed losses.
        weights: w, of the same shape, such as numbers of tokens; None for 1 each.
        coefficients: κ [C]; (1, −1) for a difference.
        seed: of the resamples.
    """
    parts = [sums, np.ones_like(sums) if weights is None else weights]
    s, w = (np.asarray(a, dtype=np.float64) for a in parts)
    s, w = (a[:, None] if a.ndim == 1 else a for a in (s, w))
    signs = np.asarray(coefficients, dtype=np.float64)
    if not s.size:
        raise InputError("there are no texts to resample: expected at least one text.")

    def statistic(texts: np.ndarray) -> np.ndarray:
        total = np.zeros(texts.shape[:-1])
        for sign, column, column_weights in zip(signs, s.T, w.T, strict=True):
            weight = column_weights[texts].sum(-1)
            nan = np.full_like(weight, np.nan)
            mean = np.divide(column[texts].sum(-1), weight, out=nan, where=weight != 0)
            total = total + sign * mean
        return total

    return interval_of(statistic, len(s), seed=seed)


def wilson(successes: float, count: int) -> Interval:
    """Return a share with Wilson's 95 % interval; halves count as such."""
    if not count:
        return Interval(np.nan, np.nan, np.nan)
    share, square = successes / count, NORMAL_QUANTILE**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    inner = share * (1 - share) / count + square / (4 * count**2)
    half = NORMAL_QUANTILE * inner**0.5 / (1 + square / count)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def mean_intervals(columns: np.ndarray, *, seed: int = 0) -> list[Interval]:
    """Return the mean of each column [n, C] with its percentile interval over resampled rows.

    All columns use the same resamples; many take little longer than one.
    """
    values, count = np.ascontiguousarray(columns.T, dtype=np.float64), len(columns)
    means: list[np.ndarray] = []
    for rows in _resamples(count, seed):
        indices = rows + count * np.arange(len(rows))[:, None]
        counts = np.bincount(indices.ravel(), minlength=rows.size).reshape(rows.shape)
        # Not a matrix product, whose sums depend on the number of threads.
        means.append(np.einsum("rn,cn->rc", counts.astype(np.float64), values) / count)
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5], axis=0)
    return [Interval(*map(float, row)) for row in zip(values.mean(-1), low, high, strict=True)]


def interval_of(
    statistic: Callable[[np.ndarray], np.ndarray], count: int, *, seed: int = 0
) -> Interval:
    """Return a statistic of n ≥ 1 rows with its percentile interval over 10,000 resamples.

    ``statistic`` maps row numbers [..., n] to values [...]; NaN is ignored.
    """
    value = float(statistic(np.arange(count)))
    if count == 1 or not np.isfinite(value):
        return Interval(value, value, value)
    resampled = np.concatenate([statistic(rows) for rows in _resamples(count, seed)])
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _resamples(count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of all resamples [up to CHUNK, n]."""
    random = np.random.default_rng(seed)
    for first in range(0, RESAMPLES, CHUNK):
        yield random.integers(count, size=(min(CHUNK, RESAMPLES - first), count))
