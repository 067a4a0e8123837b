"""The rank test of two groups within strata, by its exact permutation distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prismlm.errors import InputError


class RankTest(NamedTuple):
    """Two groups by rank, within each stratum.

    Attributes:
        u: Mann and Whitney's U of the first group, summed over strata: pairs of a stratum in which
            the first exceeds the second, ties counting half.
        effect: 2 U / pairs − 1, the rank-biserial correlation, also Cliff's δ: −1 to 1, 0 for none.
        p: of both sides, if within each stratum every assignment to groups is equally likely.
    """

    u: float
    effect: float
    p: float


def stratified_rank_test(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> RankTest:
    """Compare two groups by rank within strata, such as the heads of each layer.

    The sum over strata of the first group's ranks is compared with all of its values under
    permutation of the labels within strata; the distribution of each stratum is counted, ties
    included, and they are convolved. With one stratum it is Mann and Whitney's exact test; with
    several of one size it is van Elteren's statistic. Nothing is drawn at random.

    Args:
        first: the first group's figures in each stratum.
        second: the second group's.

    Raises:
        InputError: no stratum, a group that is empty in one, or figures that are not finite.
    """
    if not first or len(first) != len(second):
        raise InputError(
            f"{len(first)} and {len(second)} strata: expected as many of both, at least 1."
        )
    distribution, total, middle, pairs, u = np.ones(1), 0, 0, 0, 0.0
    for own, other in zip(first, second, strict=True):
        ranks = _doubled_ranks(own, other)
        size = len(own)
        sums = _rank_sums(ranks, size)
        distribution = np.convolve(distribution, sums)
        total += int(ranks[:size].sum())
        middle += size * (len(ranks) + 1)
        pairs += size * len(other)
        u += ranks[:size].sum() / 2 - size * (size + 1) / 2
    # Doubled ranks are whole, so sums are places in the distribution; its mean is `middle`.
    away = np.abs(np.arange(len(distribution)) - middle)
    p = float(distribution[away >= abs(total - middle)].sum())
    return RankTest(float(u), float(2 * u / pairs - 1), min(1.0, p))


def sign_test(values: Sequence[float]) -> float:
    """Return p of both sides for as many positive values, if either sign is equally likely.

    Zeros are left out; without any other value p is 1.
    """
    positive = sum(value > 0 for value in values)
    count = positive + sum(value < 0 for value in values)
    away = abs(2 * positive - count)
    ways = sum(math.comb(count, k) for k in range(count + 1) if abs(2 * k - count) >= away)
    return ways / 2**count


def _doubled_ranks(own: Sequence[float], other: Sequence[float]) -> np.ndarray:
    """Return twice the ranks of both groups together, ties sharing their mean; int64."""
    if not len(own) or not len(other):
        raise InputError(
            f"{len(own)} figures beside {len(other)}: expected at least one of each in a stratum."
        )
    values = np.array([*own, *other], dtype=np.float64)
    if not np.isfinite(values).all():
        raise InputError("figures to be ranked are not finite.")
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (2 * last - count + 1)[place]


def _rank_sums(ranks: np.ndarray, size: int) -> np.ndarray:
    """Return the probability of each sum of ``size`` of these ranks, all choices equally likely."""
    ways = np.zeros((size + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks.tolist():
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    return ways[size] / ways[size].sum()
