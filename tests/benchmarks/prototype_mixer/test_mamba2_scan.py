"""The scan that multiplies once what heads share is Transformers' scan, with every gradient."""

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from benchmarks.prototype_mixer import mamba2_scan
from benchmarks.prototype_mixer.mamba2_scan import REPEATED, _states, shared_scan, shared_scans


def drawn(length, groups=1, heads=4, width=3, states=5):
    torch.manual_seed(length)
    x = torch.randn(2, length, heads, width)
    b, c = (torch.randn(2, length, groups, states) for _ in range(2))
    dt, a = torch.randn(2, length, heads), -torch.rand(heads) * 4
    more = [torch.randn(heads), torch.randn(heads), torch.randn(2, heads, width, states)]
    return [tensor.requires_grad_() for tensor in (x, dt, a, b, c, *more)]


def scanned(scan, tensors, begun, limit, ended=True):
    x, dt, a, b, c, d, bias, initial = tensors
    return scan(
        x, dt, a, b, c, 8, d, bias, initial if begun else None,
        dt_softplus=True, dt_limit=limit, return_final_states=ended,
    )  # fmt: skip


@pytest.mark.parametrize("length", [1, 8, 21])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.5, 1.0)])
def test_outputs_and_gradients(length, begun, limit):
    tensors = drawn(length)
    found, expected = (scanned(scan, tensors, begun, limit) for scan in (shared_scan, REPEATED))
    needed = tensors if begun else tensors[:-1]
    drawn_weights = [torch.randn_like(one) for one in expected]
    gradients = [
        torch.autograd.grad(
            sum((w * o).sum() for w, o in zip(drawn_weights, one, strict=True)), needed
        )
        for one in (found, expected)
    ]
    for ours, theirs in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [5, 8])
def test_one_chunk_of_which_no_state_is_asked(length, monkeypatch):
    tensors = drawn(length)
    monkeypatch.delattr(mamba2_scan, "_states")
    found, (expected, _) = (
        scanned(scan, tensors, False, (0.0, float("inf")), ended)
        for scan, ended in ((shared_scan, False), (REPEATED, True))
    )
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((weights * y).sum(), tensors[:-1]) for y in (found, expected)]
    for ours, theirs in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_several_groups_are_left_to_transformers():
    tensors = drawn(9, groups=2)
    found, expected = (
        scanned(scan, tensors, True, (0.0, float("inf"))) for scan in (shared_scan, REPEATED)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_model_uses_it(monkeypatch):
    config = Mamba2Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1,
        state_size=5, chunk_size=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = Mamba2ForCausalLM(config), torch.randint(50, (2, 11))
    expected = model(ids).logits
    calls = []
    monkeypatch.setattr(mamba2_scan, "_states", lambda *of: calls.append(1) or _states(*of))
    with shared_scans():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    # Once a layer, and no more afterwards.
    assert torch.equal(model(ids).logits, expected)
    assert calls == [1, 1]
