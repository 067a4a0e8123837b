"""Intervals and corrected p-values against figures worked out by hand."""

import numpy as np
import pytest

from prismlm.errors import InputError
from prismlm.statistics import (
    Interval,
    benjamini_hochberg,
    bootstrap,
    mean_interval,
    paired_difference,
)


def test_a_constant_difference_has_an_interval_of_no_width():
    tokens = np.array([3.0, 8.0, 5.0, 1.0])
    assert bootstrap(0.25 * tokens, tokens) == Interval(0.25, 0.25, 0.25)


def test_two_texts_resample_to_three_means():
    # 0, 1/2 and 1 with probability 1/4, 1/2, 1/4.
    assert bootstrap(np.array([0.0, 1.0]), np.ones(2)) == Interval(0.5, 0.0, 1.0)


def test_means_are_over_tokens_and_differences_paired_by_text():
    sums, weights = np.array([3.0, 1.0]), np.array([1.0, 3.0])
    # Not the mean of 3 and 1/3; the second column is 5 more for every token, whatever is drawn.
    assert bootstrap(sums, weights).value == 1.0
    both = np.stack([sums + 5 * weights, sums], 1)
    apart = bootstrap(both, np.stack([weights, weights], 1), (1, -1))
    assert apart.value == 5
    assert apart.low == pytest.approx(5)
    assert apart.high == pytest.approx(5)


def test_seeds_and_what_cannot_be_resampled():
    values = np.random.default_rng(0).normal(size=30)
    ones = np.ones(30)
    assert bootstrap(values, ones, seed=1) == bootstrap(values, ones, seed=1)
    assert bootstrap(values, ones, seed=1) != bootstrap(values, ones, seed=2)
    # Of a normal mean: 1.96 standard errors, nearly.
    found = bootstrap(values, ones)
    error = values.std() / np.sqrt(30)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert np.isnan(bootstrap(values, 0 * ones).low)
    with pytest.raises(InputError, match="at least one text"):
        bootstrap(np.zeros(0), np.zeros(0))


def test_a_bootstrap_interval_has_the_width_of_the_standard_error():
    values = np.random.default_rng(1).normal(2.0, 3.0, 400)
    found = mean_interval(values)
    error = values.std() / 20
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.05)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.05)


def test_paired_difference():
    left, right = {0: 1.0, 1: 0.5, 7: 9.0}, {0: 0.75, 1: 0.25, 3: 9.0}
    assert paired_difference(left, right) == pytest.approx((0.25, 0.25, 0.25))
    noisy = {row: float(row % 2) for row in range(100)}
    interval = paired_difference(noisy, dict.fromkeys(range(100), 0.5))
    assert interval.low < 0 < interval.high
    # 100 differences of ±0.5 have a standard error of 0.05.
    assert interval.high - interval.low == pytest.approx(4 * 0.05, rel=0.1)
    with pytest.raises(InputError, match="share no document"):
        paired_difference({0: 1.0}, {1: 1.0})


def test_q_by_hand():
    # The third is found with the fourth: 0.05 · 5 / 4.
    q = benjamini_hochberg(np.array([0.01, 0.9, 0.02, 0.06, 0.05]))
    assert q.tolist() == pytest.approx([0.05, 0.9, 0.05, 0.075, 0.075])
