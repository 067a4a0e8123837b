import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prismlm.errors import InputError
from prismlm.training import losses
from prismlm.training.losses import divergence


def plain_divergence(target, logits):
    """KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) per row, p and q the softmaxes of both."""
    p = target.softmax(-1).detach()
    return (p * (p.log() - logits.softmax(-1).log())).sum(-1)


def test_two_outcomes_by_hand():
    target = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    logits = torch.tensor([[math.log(3), 0.0], [5.0, 5.0]], requires_grad=True)
    found = divergence(target, logits)
    halves = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    quarters = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    torch.testing.assert_close(found, torch.tensor([halves, quarters]))
    (found * torch.tensor([1.0, 2.0])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.25, -0.25], [-0.5, 0.5]]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 30), st.floats(0.1, 20), st.integers(0, 1000))
def test_tiles_and_gradients_are_the_naive_ones(rows, vocabulary, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    target = spread * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    logits = spread * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    weights = torch.randn(rows, generator=generator, dtype=torch.float64)
    results = []
    for function in (divergence, plain_divergence):
        leaf = logits.clone().requires_grad_()
        value = function(target, leaf)
        (value * weights).sum().backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-9)


def test_tile_size_changes_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    target, logits = (torch.randn(50, 11, generator=generator) for _ in range(2))
    whole = divergence(target, logits)
    monkeypatch.setattr(losses, "TILE_ELEMENTS", 1)
    torch.testing.assert_close(divergence(target, logits), whole, rtol=0, atol=1e-6)


def test_bf16_is_measured_in_float32():
    generator = torch.Generator().manual_seed(0)
    target, logits = (torch.randn(5, 64, generator=generator).bfloat16() for _ in range(2))
    leaf = logits.clone().requires_grad_()
    found = divergence(target, leaf)
    assert found.dtype == torch.float32
    expected = plain_divergence(target.double(), logits.double()).float()
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_equal_predictions_have_none_and_shapes_must_agree():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    assert divergence(logits + 3, logits).abs().max() < 1e-6
    with pytest.raises(InputError, match=r"\[4, 9\] and \[4, 9, 1\]"):
        divergence(logits, logits[..., None])
