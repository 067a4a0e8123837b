"""What chance alone would give: exact tests over cases, without a distribution assumed.

Source: ours; the source's tables have no test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def rank_among(value: float, others: Sequence[float]) -> float:
    """Return how many of ``others`` a value exceeds, ties counting half: 0 to their number."""
    return sum((value > other) + (value == other) / 2 for other in others)


def rank_sum_p(ranks: Sequence[float], others: int) -> float:
    """Return P(Σ ranks at least this large) if every rank from 0 to ``others`` is equally likely.

    The null says that in each case the value is exchangeable with the ``others`` beside it, and
    that cases are independent: a permutation test over cases, of one side, computed exactly. With
    one other it is the sign test. Ties, given as halves, make it err towards large p.
    """
    one = np.zeros(2 * others + 1)
    one[::2] = 1 / (others + 1)
    total = np.ones(1)
    for _ in ranks:
        total = np.convolve(total, one)
    # Rounding must not push a sum over a half.
    least = round(2 * sum(ranks))
    return float(min(1.0, total[least:].sum()))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the median with at least 95 % confidence, or None.

    Two values of the sample, as far inside as the binomial distribution allows; fewer than 6
    independent values have none.
    """
    low, high = stats.quantile_test(values).confidence_interval(0.95)
    return None if math.isnan(low) else (float(low), float(high))
