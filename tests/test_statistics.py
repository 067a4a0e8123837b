"""Bootstrap intervals against figures worked out by hand."""

import numpy as np
import pytest

from prismlm.errors import InputError
from prismlm.statistics import Interval, bootstrap


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
