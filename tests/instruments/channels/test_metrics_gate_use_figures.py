"""The figures of Appendix A.8 by hand, their limits, and counts in any parts."""

import math

import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.channels.metrics import (
    LayerTally,
    count_bins,
    entropy,
    equal_bins,
    gini,
    information,
    sparsity_ratio,
)

HAND = torch.tensor([[1.0, 2.0, 3.0, 2.0], [0.0, 0.0, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0]])


def test_figures_by_hand():
    # max 3 over mean 2; 4 over 1; 1 over 1.
    assert sparsity_ratio(HAND).tolist() == [1.5, 4.0, 1.0]
    # Ascending 1 2 2 3 with weights 4 3 2 1: 17, so (5 − 34/8) / 4; alone: (5 − 2) / 4.
    assert gini(HAND).tolist() == [0.1875, 0.75, 0.0]
    # Shares ⅛ ¼ ⅜ ¼: ⅛·3 ln 2 + 2·¼·2 ln 2 + ⅜ (3 ln 2 − ln 3).
    first = (3 / 8 + 1 + 9 / 8) * math.log(2) - 3 / 8 * math.log(3)
    torch.testing.assert_close(
        entropy(HAND), torch.tensor([first, 0.0, math.log(4)], dtype=torch.float64)
    )


@pytest.mark.parametrize("metric", [sparsity_ratio, gini, entropy])
def test_positions_without_a_distribution_are_refused(metric):
    with pytest.raises(InputError, match="no activation at all"):
        metric(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    with pytest.raises(InputError, match="not finite"):
        metric(torch.tensor([[math.nan, 1.0]]))


def test_equal_bins_by_hand():
    sample = torch.tensor([[4.0, 0.0], [1.0, 0.0], [3.0, 0.0], [2.0, 1.0]])
    assert equal_bins(sample, 2).tolist() == [[2.0], [0.0]]
    assert equal_bins(sample, 4).tolist() == [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]


def test_information_by_hand():
    # Channel 0 says which token it is, channel 1 nothing, channel 2 something.
    edges = torch.tensor([[0.5], [0.5], [0.5]]).double()
    counts = torch.zeros(3, 3, 2, dtype=torch.int64)
    tokens = torch.tensor([0, 0, 2, 2])
    values = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.9, 0.1], [0.9, 0.1, 0.1], [0.9, 0.9, 0.9]])
    count_bins(counts, edges, tokens, values)
    # ln 2 + H(¾, ¼) − H(½, ¼, ¼).
    ln2, ln3 = math.log(2), math.log(3)
    third = ln2 + (2 * ln2 - 0.75 * ln3) - 1.5 * ln2
    expected = torch.tensor([ln2, 0.0, third], dtype=torch.float64)
    torch.testing.assert_close(information(counts), expected)
    # Pairs seen: 2, 4 and 3; tokens and bins 2 each; n = 4.
    correction = torch.tensor([1 / 8, -1 / 8, 0.0], dtype=torch.float64)
    torch.testing.assert_close(information(counts, corrected=True), expected + correction)


def test_an_edge_belongs_to_the_bin_below_it():
    counts = torch.zeros(1, 1, 3, dtype=torch.int64)
    values = torch.tensor([[0.25], [0.26], [0.5], [0.6]])
    count_bins(counts, torch.tensor([[0.25, 0.5]]).double(), torch.zeros(4).long(), values)
    assert counts.tolist() == [[[1, 2, 1]]]


def test_figures_of_groups_are_those_of_each_group():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(9, (50,), generator=generator)
    gates = torch.randn(50, 3, 4, generator=generator).softmax(-1)
    tally = LayerTally(9, groups=3)
    tally.add(tokens, gates.flatten(1))
    found = tally.metrics(0)
    alone = []
    for group in gates.unbind(1):
        own = LayerTally(9)
        own.add(tokens, group)
        alone.append(torch.tensor(list(own.metrics(0).values())))
    assert list(found.values()) == pytest.approx(torch.stack(alone).mean(0).tolist(), rel=1e-5)
    even = LayerTally(9, groups=3)
    even.add(tokens, torch.full((50, 12), 0.25))
    assert tuple(even.metrics(0).values())[3:6] == pytest.approx((1, 0, math.log(4)))


def test_a_tally_is_the_same_in_any_batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(9, (100,), generator=generator)
    values = torch.rand(100, 4, generator=generator)
    found = []
    for sizes in ([100], [60, 40], [55, 5, 39, 1]):
        # Bins are laid by the first 60 positions, or by the batches that first reach them.
        tally = LayerTally(9, bins=3, sample=60 if len(sizes) > 1 else 100)
        for t, v in zip(tokens.split(sizes), values.split(sizes), strict=True):
            tally.add(t, v)
        found.append(tally.metrics(5))
    assert found[1] == pytest.approx(found[2])
    assert found[0]["positions"] == found[1]["positions"] == 100
    assert (found[0]["layer"], found[0]["gini"]) == (5, pytest.approx(gini(values).mean().item()))
    assert found[0]["entropy"] == pytest.approx(entropy(values).mean().item())
    assert found[0]["sparsity_ratio"] == pytest.approx(sparsity_ratio(values).mean().item())
    counts = torch.zeros(9, 4, 3, dtype=torch.int64)
    count_bins(counts, equal_bins(values, 3), tokens, values)
    assert found[0]["mutual_information"] == pytest.approx(information(counts).mean().item())
