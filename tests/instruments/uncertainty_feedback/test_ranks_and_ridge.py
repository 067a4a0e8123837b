"""Ranks and ridge regression against figures worked out by hand."""

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback.ranks import matched_ranks, rank_correlation
from prismlm.instruments.uncertainty_feedback.ridge import Moments


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
    # Ties share their mean.
    assert rank_correlation(np.array([1, 1, 2]), np.array([1, 1, 5])) == pytest.approx(1)


def test_what_the_position_alone_makes_is_not_found_within_positions():
    rng = np.random.default_rng(0)
    place = np.tile(np.arange(20.0), (12, 1))
    codes = place + rng.random((12, 20))
    exact = matched_ranks(codes, place)
    assert (exact.correlation, exact.p) == (0.0, 1.0)
    noisy = place + rng.random((12, 20))
    assert rank_correlation(codes, noisy) > 0.9
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


def test_a_planted_linear_code_is_read_and_a_shuffled_one_is_not():
    generator = torch.Generator().manual_seed(0)
    x = 100 + torch.randn(600, 5, generator=generator) * torch.tensor([1, 10, 0.1, 1, 0])
    code = x @ torch.tensor([1.0, -0.2, 3.0, 0.0, 0.0]) + 7
    mixed = code[torch.randperm(600, generator=generator)]
    y = torch.stack([code, mixed], 1)
    moments = Moments(5, 2)
    for part in range(0, 400, 100):
        moments.add(x[part : part + 100], y[part : part + 100])
    probe = moments.fit()
    apart = ((probe(x[400:]) - y[400:]) ** 2).sum(0) / ((y[400:] - y[400:].mean(0)) ** 2).sum(0)
    assert apart[0] < 1e-4
    assert apart[1] > 0.9
    # The equation, with the penalty that was chosen: the least of those on offer.
    np.testing.assert_allclose(probe.weight[:, 0].tolist(), [1, -0.2, 3, 0, 0], atol=1e-2)
    with pytest.raises(InputError, match="at least 2"):
        Moments(5, 2).fit()


def test_ridge_is_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    y = x[:, :1] + torch.randn(8, 1, generator=generator, dtype=torch.float64)
    moments = Moments(20, 1)
    moments.add(x, y)
    probe = moments.fit()
    inner = (x - x.mean(0)) / x.std(0, correction=0)
    scores = {}
    for power in range(-6, 3):
        matrix = inner.T @ inner / 8 + 10.0**power * torch.eye(20, dtype=torch.float64)
        weight = torch.linalg.solve(matrix, inner.T @ (y - y.mean()) / 8)
        hat = inner @ torch.linalg.solve(matrix, inner.T) / 8
        error = ((y - y.mean() - inner @ weight) ** 2).mean()
        freedom = 1 - (hat.trace() + 1) / 8
        if freedom >= 0.1:
            scores[float(error / freedom**2)] = weight
    best = scores[min(scores)]
    torch.testing.assert_close(probe.weight, best / x.std(0, correction=0)[:, None])
    torch.testing.assert_close(probe(x).mean(), y.mean())
