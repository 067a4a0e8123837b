"""The delta rule: by hand, and in chunks against its recurrence."""

import pytest
import torch
from torch.nn import functional as F

from prismlm.ops.delta_rule import chunked, naive

FORMS = [naive, chunked]


def inputs(b, t, h, k, d, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(b, t, h, n, generator=generator, dtype=dtype) for n in (k, k, d)]
    rates = torch.rand(b, t, h, generator=generator, dtype=dtype)
    return [draw[0], F.normalize(draw[1], dim=-1), draw[2], rates]


@pytest.mark.parametrize("form", FORMS)
def test_hand_computed(form):
    keys = torch.tensor([[1.0, 0.0], [0.6, 0.8], [1.0, 0.0]]).reshape(1, 3, 1, 2)
    queries = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).reshape(1, 3, 1, 2)
    values = torch.tensor([10.0, 4.0, 0.0]).reshape(1, 3, 1, 1)
    rates = torch.tensor([1.0, 0.5, 1.0]).reshape(1, 3, 1)
    out, state = form.delta_rule(queries, keys, values, rates)
    # S = (10, 0). Then k·S = 6, and half of 4 − 6 is written along k: S = (9.4, −0.8).
    # Then k·S = 9.4 is overwritten by 0: S = (0, −0.8).
    torch.testing.assert_close(out.flatten(), torch.tensor([10.0, 9.4, -0.8]))
    torch.testing.assert_close(state.flatten(), torch.tensor([0.0, -0.8]))


def run(form, arguments, state, flags):
    leaves = [x.clone().requires_grad_() for x in (*arguments, *([] if state is None else [state]))]
    out, end = form.delta_rule(*leaves, **flags)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, end)]
    loss = (out * weights[0]).sum() + (end * weights[1]).sum()
    return out, end, torch.autograd.grad(loss, leaves, materialize_grads=True)


@pytest.mark.parametrize("flags", ["none", "mask", "starts", "both"])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("length", [1, 9, 64, 150])
def test_chunked_equals_the_recurrence(length, with_state, flags):
    """Outputs, states and every gradient."""
    generator = torch.Generator().manual_seed(length)
    options = {}
    if flags in ("mask", "both"):
        options["mask"] = torch.rand(2, length, generator=generator) < 0.7
    if flags in ("starts", "both"):
        options["starts"] = torch.rand(2, length, generator=generator) < 0.05
    state = torch.randn(2, 2, 3, 4, generator=generator, dtype=torch.float64)
    arguments = inputs(2, length, 2, 3, 4, length), state if with_state else None, options
    results = (run(form, *arguments) for form in FORMS)
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)
