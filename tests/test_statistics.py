"""Intervals and rank correlations against figures worked out by hand."""

import numpy as np
import pytest

from prismlm.errors import InputError
from prismlm.statistics import (
    Interval,
    RankCorrelation,
    bootstrap,
    interval_of,
    mean_intervals,
    spearman,
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


@pytest.mark.filterwarnings("error")
def test_resamples_without_weight_count_for_nothing_and_warn_of_nothing():
    # Of the first text alone, one, two or three times: 8 in 27 resamples have no weight.
    found = bootstrap(np.array([2.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0]))
    assert found == Interval(2.0, 2.0, 2.0)


def test_any_figure_has_an_interval():
    # The median of 1, 2 and 9 resampled is 1, 2 or 9 with 7, 13 and 7 of 27 chances.
    values = np.array([1.0, 2.0, 9.0])
    found = interval_of(lambda rows: np.median(values[rows], axis=-1), 3)
    assert found == Interval(2, 1, 9)


def test_spearman_by_hand():
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    # Σ d² = 0 + 1 + 1 + 1 + 1 = 4, so 1 − 6·4 / (5·24).
    y = np.array([10.0, 30.0, 20.0, 50.0, 40.0])
    assert spearman(x, y).rho == pytest.approx(0.8)
    assert spearman(x, -y).rho == pytest.approx(-0.8)
    # Ranks 1.5 1.5 3 4 against 1 2 3 4, both minus 2.5: 4.5 / √(4.5 · 5).
    tied = spearman(np.array([7.0, 7, 8, 9]), np.array([1.0, 2, 3, 4]))
    assert tied.rho == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    # With two degrees of freedom the two-sided p of Student's t is 1 − |ρ|, with one
    # 1 − 2 asin|ρ| / π.
    assert tied.p == pytest.approx(1 - tied.rho)
    assert spearman(x[:3], np.array([1.0, 3, 2])).p == pytest.approx(1 - 2 / np.pi * np.arcsin(0.5))
    assert spearman(np.ones(4), x[:4]) == RankCorrelation(0.0, 1.0, 4)


def test_what_has_no_ranks_is_refused():
    with pytest.raises(InputError, match="3 pairs"):
        spearman(np.arange(2.0), np.arange(2.0))
    with pytest.raises(InputError, match="finite"):
        spearman(np.array([0.0, 1, np.inf]), np.arange(3.0))


def test_means_of_columns_are_those_of_each_and_differences_are_paired():
    columns = np.random.default_rng(0).normal(size=(40, 2))
    columns = np.column_stack([columns, columns[:, 0] - columns[:, 1]])
    found = mean_intervals(columns, seed=1)
    for column, one in zip(columns.T, found, strict=True):
        alone = bootstrap(column)
        assert one.value == pytest.approx(alone.value)
        assert (one.low, one.high) == pytest.approx((alone.low, alone.high), abs=0.02)
    assert mean_intervals(columns[:, :1], seed=1) == found[:1]
    assert mean_intervals(np.array([[2.0], [2.0]])) == [Interval(2.0, 2.0, 2.0)]
