"""Rank correlation, quartiles and repetition by hand."""

import math

import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.channels.metrics import quartiles, repetition
from prismlm.instruments.channels.report import Channel, LayerReport, locality_table


def report(lives, repetitions):
    channels = tuple(
        Channel(number, None, life, repetition, (), ())
        for number, (life, repetition) in enumerate(zip(lives, repetitions, strict=True))
    )
    return [LayerReport(0, False, {}, None, channels)]


def test_what_has_no_ranks_says_why():
    alike = locality_table(report([13.5] * 3, [0.1, 0.2, 0.3]))
    assert "rho" not in alike.facts
    assert alike["no_rho"] == "the half-life is one figure 3 times: it has no ranks."
    assert "decay alike" in alike["no_quartiles"]
    few = locality_table(report([1.0, 2.0], [0.1, 0.2]))
    assert "rho" not in few.facts
    assert "3 pairs" in few["no_rho"]


def test_quartiles_by_hand():
    lives = torch.tensor([8.0, 1, 2, 3, 4, 5, 6, 7])
    scores = torch.tensor([0.3, 0.9, 0.7, 0.6, 0.5, 0.5, 0.4, 0.1])
    found = quartiles(lives, scores)
    assert found["bounds"] == [2.75, 4.5, 6.25]
    assert found["counts"] == [2, 2, 2, 2]
    assert found["means"] == pytest.approx([0.8, 0.55, 0.45, 0.2])
    # Both groups lie 0.1 around their means: Σ squares 0.04 over 2 degrees of freedom.
    assert found["cohens_d"] == pytest.approx(0.6 / math.sqrt(0.02), rel=1e-5)


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
    tokens = torch.tensor([[[5, 5, 6], [5, -1, -1]], [[1, 2, 3], [4, 5, 6]]])
    # Two distinct of four, and six of six.
    assert repetition(tokens).tolist() == [0.5, 0.0]
