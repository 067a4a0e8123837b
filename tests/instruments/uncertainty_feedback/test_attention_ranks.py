"""Rank correlations within positions against figures worked out by hand."""

import numpy as np
import pytest

from prismlm.instruments.uncertainty_feedback.attention import matched_ranks
from prismlm.statistics import spearman


def test_ranks_within_positions_by_hand():
    x, y = np.array([[1.0], [2.0], [3.0]]), np.array([[10.0], [30.0], [20.0]])
    found = matched_ranks(x, y)
    # Of the six orders, 1, ½, ½, −½, −½, −1: all are as large as ½.
    assert found.correlation == pytest.approx(0.5)
    assert found.p == 1
    assert found.by_text.mean() == pytest.approx(found.correlation)
    # (−1, 0, 1) and (−1, 1, 0): products 1, 0, 0, over a norm of 2.
    np.testing.assert_allclose(found.by_text, [1.5, 0, 0])
    # Two positions that go opposite ways cancel.
    assert matched_ranks(np.hstack([x, x]), np.hstack([y, -y])).correlation == pytest.approx(0)


def test_what_the_position_alone_makes_is_not_found_within_positions():
    rng = np.random.default_rng(0)
    place = np.tile(np.arange(20.0), (12, 1))
    codes = place + rng.random((12, 20))
    exact = matched_ranks(codes, place)
    assert (exact.correlation, exact.p) == (0.0, 1.0)
    noisy = place + rng.random((12, 20))
    assert spearman(codes.ravel(), noisy.ravel()).rho > 0.9
    assert matched_ranks(codes, noisy).p > 0.1
    # What a text makes on top is found.
    real = matched_ranks(codes, codes + place + 0.1 * rng.random((12, 20)))
    assert real.correlation > 0.9
    assert real.p == 1 / 1000


def test_null_of_rows_keeps_what_goes_together_along_a_text():
    """A text-wide shift of x and of y, independent of one another, must not be found too often."""
    rng = np.random.default_rng(1)
    found = []
    for seed in range(40):
        x, y = (rng.normal(size=(8, 1)) + 0.1 * rng.normal(size=(8, 30)) for _ in range(2))
        found.append(matched_ranks(x, y, permutations=199, seed=seed).p)
    assert np.mean(np.array(found) <= 0.05) <= 0.15
