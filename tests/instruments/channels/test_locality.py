"""Rank correlation, quartiles and repetition by hand."""

import math

import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.channels.build_report import locality_of
from prismlm.instruments.channels.locality import quartiles, repetition
from prismlm.instruments.channels.report import Channel, LayerReport
from prismlm.instruments.channels.top_sequences import empty_ranking


def report(lives, repetitions):
    channels = tuple(
        Channel(number, None, life, repetition, (), ())
        for number, (life, repetition) in enumerate(zip(lives, repetitions, strict=True))
    )
    return [LayerReport(0, False, {}, None, channels)]


def test_p_is_students_whatever_is_installed():
    # ρ is 1 − 6·4 / (4·15) of four channels, and p 1 − |ρ| with two degrees of freedom.
    locality = locality_of(report([1.0, 2.0, 3.0, 4.0], [0.2, 0.1, 0.4, 0.3]))
    found = locality.correlation
    assert found is not None
    assert (found.rho, found.p, found.count) == (pytest.approx(0.6), pytest.approx(0.4), 4)


def test_what_has_no_ranks_says_why():
    alike = locality_of(report([13.5] * 3, [0.1, 0.2, 0.3]))
    assert alike.correlation is None
    assert alike.no_correlation == "the half-life is one figure 3 times: it has no ranks."
    few = locality_of(report([1.0, 2.0], [0.1, 0.2]))
    assert few.correlation is None
    assert few.no_correlation is not None
    assert "3 pairs" in few.no_correlation


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
