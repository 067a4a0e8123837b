"""Intervals and rank correlations against figures worked out by hand."""

import numpy as np
import pytest

from prismlm.errors import InputError
from prismlm.statistics import Interval, bootstrap, interval_of, mean_intervals, spearman

TOKENS = np.array([3.0, 8.0, 5.0, 1.0])
MEDIANS = np.array([1.0, 2.0, 9.0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        # A constant difference.
        (lambda: bootstrap(0.25 * TOKENS, TOKENS), (0.25, 0.25, 0.25)),
        # 0, 1/2 and 1 with probability 1/4, 1/2, 1/4.
        (lambda: bootstrap(np.array([0.0, 1.0]), np.ones(2)), (0.5, 0.0, 1.0)),
        # 8 of 27 resamples have no weight.
        (lambda: bootstrap(np.array([2.0, 0, 0]), np.array([1.0, 0, 0])), (2.0, 2.0, 2.0)),
        # The median of the resamples is 1, 2 or 9 in 7, 13 and 7 of 27 cases.
        (lambda: interval_of(lambda rows: np.median(MEDIANS[rows], axis=-1), 3), (2, 1, 9)),
        (lambda: mean_intervals(np.array([[2.0], [2.0]]))[0], (2.0, 2.0, 2.0)),
    ],
)
def test_intervals_by_hand(interval, expected):
    assert interval() == Interval(*expected)


def test_means_are_weighted_and_differences_paired_by_text():
    sums, weights = np.array([3.0, 1.0]), np.array([1.0, 3.0])
    # Not the mean of 3 and 1/3; the first column below is 5 more for every token.
    assert bootstrap(sums, weights).value == 1.0
    both = np.stack([sums + 5 * weights, sums], 1)
    difference = bootstrap(both, np.stack([weights, weights], 1), (1, -1))
    assert (difference.value, difference.low, difference.high) == pytest.approx((5, 5, 5))


def test_an_interval_of_normal_values_depends_on_the_seed_alone():
    values, ones = np.random.default_rng(0).normal(size=30), np.ones(30)
    interval = bootstrap(values, ones)
    assert bootstrap(values, ones) == interval != bootstrap(values, ones, seed=2)
    width = 2 * 1.96 * values.std() / np.sqrt(30)
    assert interval.high - interval.low == pytest.approx(width, rel=0.05)
    assert np.isnan(bootstrap(values, 0 * ones).low)
    with pytest.raises(InputError, match="at least one text"):
        bootstrap(np.zeros(0), np.zeros(0))


def test_spearman_by_hand():
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    # Σ d² = 0 + 1 + 1 + 1 + 1 = 4, so 1 − 6·4 / (5·24).
    y = np.array([10.0, 30.0, 20.0, 50.0, 40.0])
    assert spearman(x, y)[0] == pytest.approx(0.8)
    assert spearman(x, -y)[0] == pytest.approx(-0.8)
    # Ranks 1.5 1.5 3 4 against 1 2 3 4, both minus 2.5: 4.5 / √(4.5 · 5).
    rho, p = spearman(np.array([7.0, 7, 8, 9]), np.array([1.0, 2, 3, 4]))
    assert rho == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    # With two degrees of freedom the two-sided p of Student's t is 1 − |ρ|, with one
    # 1 − 2 asin|ρ| / π.
    assert p == pytest.approx(1 - rho)
    _, p = spearman(x[:3], np.array([1.0, 3, 2]))
    assert p == pytest.approx(1 - 2 / np.pi * np.arcsin(0.5))
    assert spearman(np.ones(4), x[:4]) == (0.0, 1.0)
    with pytest.raises(InputError, match="2 pairs"):
        spearman(x[:2], x[:2])
    with pytest.raises(InputError, match="finite"):
        spearman(np.array([0.0, 1, np.inf]), x[:3])
