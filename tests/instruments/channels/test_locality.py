"""Rank correlation, quartiles, repetition and lags by hand."""

import itertools
import math
import sys

import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.channels.locality import quartiles, repetition, spearman
from prismlm.instruments.channels.top_sequences import empty_ranking


def test_spearman_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    # Σ d² = 0 + 1 + 1 + 1 + 1 = 4, so 1 − 6·4 / (5·24).
    y = torch.tensor([10.0, 30.0, 20.0, 50.0, 40.0])
    assert spearman(x, y, permutations=9).rho == pytest.approx(0.8)
    assert spearman(x, -y, permutations=9).rho == pytest.approx(-0.8)
    # Ranks 1.5 1.5 3 4 against 1 2 3 4, both minus 2.5: 4.5 / √(4.5 · 5).
    tied = spearman(torch.tensor([7.0, 7, 8, 9]), torch.tensor([1.0, 2, 3, 4]), permutations=9)
    assert tied.rho == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_p_of_permutations_is_near_that_of_all_orders():
    x = torch.arange(5.0)
    y = torch.tensor([0.0, 2.0, 1.0, 4.0, 3.0])
    squares = [
        sum((a - b) ** 2 for a, b in enumerate(order)) for order in itertools.permutations(range(5))
    ]
    exact = sum(abs(1 - s / 20) >= 0.8 - 1e-9 for s in squares) / 120
    found = spearman(x, y, permutations=4000, seed=3)
    assert (found.p_from, found.count) == ("permutations", 5)
    assert found.p == pytest.approx(exact, abs=0.02)
    assert spearman(x, y, permutations=4000, seed=3) == found
    assert spearman(x, y, permutations=4000, seed=4).p != found.p


def test_p_by_students_distribution():
    stats = pytest.importorskip("scipy.stats")
    x = torch.rand(40, generator=torch.Generator().manual_seed(0))
    y = torch.rand(40, generator=torch.Generator().manual_seed(1)) - 0.4 * x
    found, expected = spearman(x, y), stats.spearmanr(x.numpy(), y.numpy())
    assert found.p_from == "t"
    assert found.rho == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue)
    assert spearman(x, y, permutations=4000).p == pytest.approx(found.p, abs=0.03)


def test_without_scipy_rho_is_the_same_and_p_from_permutations(monkeypatch):
    pytest.importorskip("scipy.stats")
    x = torch.rand(60, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    y = torch.rand(60, generator=torch.Generator().manual_seed(3)) + 0.5 * x
    with_it = spearman(x, y)
    monkeypatch.setitem(sys.modules, "scipy", None)
    without = spearman(x, y)
    assert (with_it.p_from, without.p_from) == ("t", "permutations")
    assert (without.rho, without.count) == (with_it.rho, with_it.count)
    assert 0.001 < with_it.p < 0.2
    assert without.p == pytest.approx(with_it.p, abs=0.01)


def test_what_has_no_ranks_is_refused():
    with pytest.raises(InputError, match="x is one figure 3 times"):
        spearman(torch.ones(3), torch.arange(3.0))
    with pytest.raises(InputError, match="3 pairs"):
        spearman(torch.arange(2.0), torch.arange(2.0))
    with pytest.raises(InputError, match="finite"):
        spearman(torch.tensor([0.0, 1, math.inf]), torch.arange(3.0))


def test_quartiles_by_hand():
    lives = torch.tensor([8.0, 1, 2, 3, 4, 5, 6, 7])
    scores = torch.tensor([0.3, 0.9, 0.7, 0.6, 0.5, 0.5, 0.4, 0.1])
    found = quartiles(lives, scores)
    assert found.bounds == (2.75, 4.5, 6.25)
    assert found.counts == (2, 2, 2, 2)
    assert found.means == pytest.approx((0.8, 0.55, 0.45, 0.2))
    # Both groups lie 0.1 around their means: Σ squares 0.04 over 2 degrees of freedom.
    assert found.cohens_d == pytest.approx(0.6 / math.sqrt(0.02), rel=1e-5)


def test_quartiles_of_channels_that_decay_alike_are_refused():
    with pytest.raises(InputError, match="decay alike"):
        quartiles(torch.full((8,), 13.5), torch.rand(8))
    with pytest.raises(InputError, match="no unit"):
        quartiles(torch.arange(8.0), torch.full((8,), 0.5))
    # The mean of three tenths is not .1 in float64.
    scores = torch.tensor([0.1] * 3 + [0.2] * 6 + [0.0] * 3, dtype=torch.float64)
    with pytest.raises(InputError, match="no unit"):
        quartiles(torch.arange(12.0), scores)


def test_repetition_by_hand():
    best = empty_ranking(2, 2, 3)
    best.token[0] = torch.tensor([[5, 5, 6], [5, -1, -1]])
    best.token[1] = torch.tensor([[1, 2, 3], [4, 5, 6]])
    # Two distinct of four, and six of six.
    assert repetition(best).tolist() == [0.5, 0.0]
    with pytest.raises(InputError, match="no kept tokens"):
        repetition(empty_ranking(1, 1, 1))
