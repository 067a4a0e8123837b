import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.attribution.judges.passages import Prediction
from benchmarks.attribution.judges.tail_patch import tail_patch


class Bigram(nn.Module):
    """Logits of the next token are a row of a table, so that gradients are those of a softmax."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.table[input_ids])


def test_one_step_by_hand():
    model = Bigram([[0.0, 0.0], [0.0, 0.0]])
    asked = Prediction(np.array([1, 0]), 1)
    # 0→1, 0→1, 1→0: of three tokens two are after 0. The gradient of row 0 is
    # 2/3 · (softmax − one-hot) = 2/3 · (½, −½), so that a step of 0.3 makes it (−0.1, 0.1).
    passages = [np.array([0, 1]), np.array([0, 1, 0]), np.array([1])]
    expected = 0.1 - math.log(math.exp(-0.1) + math.exp(0.1)) - math.log(0.5)
    lists = [passages, [np.array([1, 0])]]
    gains, specific = tail_patch(model, [asked, asked], lists, learning_rate=0.3)
    # The second prediction starts from the same weights, and its passage says nothing of row 0.
    np.testing.assert_allclose(gains, [expected, 0], atol=1e-6)
    assert np.isnan(specific).all()


def test_what_is_raised_everywhere_is_not_specific():
    model = Bigram([[0.0, 0.0], [0.5, -2.0]])
    asked = Prediction(np.array([1, 0]), 1)
    # One step of 1: row 0 moves by ½ · (−½, ½), row 1 by ½ · (−σ(2.5), σ(2.5)). Log-odds of the
    # second of two tokens are the difference of the logits.
    here, there = 0.5, 1 / (1 + math.exp(-2.5))
    lists = [[np.array([0, 1]), np.array([1, 1])]]
    found = tail_patch(
        model, [asked], lists, contexts=[np.array([1]), np.array([0])], learning_rate=1.0
    )
    assert found.gain[0] == pytest.approx(math.log(1 / (1 + math.exp(-0.5))) - math.log(0.5))
    assert found.specific[0] == pytest.approx(here - (there + here) / 2, rel=1e-5)


def test_the_model_is_as_before_also_after_a_failure():
    model = Bigram([[0.5, -1.0], [2.0, 0.25]]).train()
    before = model.table.detach().clone()
    asked = Prediction(np.array([0]), 1)
    tail_patch(model, [asked], [[np.array([0, 1, 1])]])
    assert torch.equal(model.table, before)
    with pytest.raises(IndexError):
        tail_patch(model, [Prediction(np.array([0]), 9)], [[np.array([0, 1, 1])]])
    assert torch.equal(model.table, before)
    assert model.training
    assert model.table.grad is None


def test_only_weights_that_are_named_move():
    class Two(Bigram):
        def forward(self, input_ids, use_cache):
            return SimpleNamespace(logits=self.table[input_ids] + self.unused)

    model = Two([[0.0, 0.0], [0.0, 0.0]])
    asked, passages = [Prediction(np.array([1]), 1)], [[np.array([0, 1])]]
    # The gradient of the offset is softmax − one-hot, (½, −½); the table's is of the other row.
    moved = math.log(1 / (1 + math.exp(-0.5))) - math.log(0.5)
    for weights, expected in (([model.unused], moved), ([model.table], 0), (None, moved)):
        found = tail_patch(model, asked, passages, learning_rate=0.5, weights=weights)
        assert found.gain[0] == pytest.approx(expected, abs=1e-6)
    assert model.unused.tolist() == [1, 1]
