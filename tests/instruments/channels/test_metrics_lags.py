"""Lags between writing and reading."""

import pytest
import torch

from prismlm.instruments.channels.metrics import LagTally
from tests.helpers.lags import read_write_lags
from tests.helpers.mixer_models import CHANNELS


def test_lags_are_read_from_the_models_gates(model, sequences):
    found = read_write_lags(model, sequences, max_lag=2, shuffles=9, layers=[0, 2])
    assert sorted(found) == [0, 2]
    # Layer 0 reads by its write gate.
    assert found[0].peak.tolist() == [0] * CHANNELS
    torch.testing.assert_close(found[0].correlation[:, 2], torch.ones(CHANNELS).double())
    torch.testing.assert_close(found[0].p, torch.full((CHANNELS,), 0.1).double())
    assert (found[2].correlation[:, 2] < 0.999).all()


def test_cross_correlation_by_hand():
    tally = LagTally(1, max_lag=2, shuffles=2)
    # Minus their means: read 1 −1 0 0, write 0 1 −1 0.
    tally.add(torch.tensor([[2.0], [3], [1], [2]]), torch.tensor([[3.0], [1], [2], [2]]))
    found = tally.result()
    assert found.lags.tolist() == [-2, -1, 0, 1, 2]
    # ℓ = 1: r_0 w_1 + r_1 w_2 = 2, ℓ = 0: r_1 w_1 = −1, ℓ = 2: r_0 w_2 = −1; both energies are 2.
    torch.testing.assert_close(
        found.correlation, torch.tensor([[0.0, 0.0, -0.5, 1.0, -0.5]], dtype=torch.float64)
    )
    assert found.peak.tolist() == [1]


def random_gates(count, length, channels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(length + 3 * i, channels, generator=generator) for i in range(count)]


def test_a_read_before_each_write_peaks_at_one_and_unrelated_gates_do_not():
    tally, noise = LagTally(3, seed=1), random_gates(6, 40, 3, seed=9)
    for write, other in zip(random_gates(6, 40, 3), noise, strict=True):
        read = torch.cat([write[1:], write[:1]]) + 0.1 * other
        read[:, 2] = other[:, 2]
        write[:, 1] = torch.roll(read[:, 1], -2)
        tally.add(write, read)
    found = tally.result()
    # Channel 1 is written two positions before it is read.
    assert found.peak.tolist()[:2] == [1, -2]
    assert found.p.tolist()[:2] == [0.01, 0.01]
    assert found.correlation[:2].amax(1).min() > 0.9
    assert found.p[2] > 0.01
    assert found.null_mean.abs().max() < 0.05
    # Of n independent pairs the standard deviation is about 1/√n, here n = 285.
    assert found.null_deviation.mean().item() == pytest.approx(285**-0.5, rel=0.15)


def test_a_gate_that_never_varies_has_no_correlation():
    tally = LagTally(2)
    (write,) = random_gates(1, 30, 2)
    write[:, 0] = 0.1
    tally.add(write, random_gates(1, 30, 2, seed=4)[0])
    found = tally.result()
    assert found.correlation.isnan().any(1).tolist() == [True, False]
    assert found.p.isnan().tolist() == [True, False]
