"""Gradients of the prefix mean over long rows, in float32 against the recurrence in float64."""

import pytest
import torch

from prismlm.ops.prototype_mixer import chunked
from tests.helpers.prefix_rows import inputs, recurrence

DECAYS = [0.001, 0.1, 0.9, 0.99, 0.999, 0.9999]


def gradients(form, arguments):
    """Return d(out · g) of every input, for one g."""
    leaves = [x.clone().requires_grad_() for x in arguments]
    out, _ = form(*leaves)
    generator = torch.Generator().manual_seed(7)
    g = torch.randn(out.shape, generator=generator)
    return torch.autograd.grad((out * g.to(out.dtype)).sum(), leaves)


def largest_error(length):
    """Return the largest relative error of a gradient: per channel for β, else over the row."""
    write, read, values, _ = inputs(1, length, len(DECAYS), 4, 12)
    arguments = (write, read, values, torch.tensor(DECAYS))
    fast = gradients(chunked.prefix_mean, arguments)
    slow = gradients(recurrence, [x.double() for x in arguments])
    errors = []
    for name, a, e in zip(("write", "read", "values", "decay"), fast, slow, strict=True):
        assert torch.isfinite(a).all(), name
        error, norm = (x if name == "decay" else x.norm(dim=(0, 1)) for x in (a.double() - e, e))
        errors.append((error.abs() / norm.abs()).max().item())
    return max(errors)


def softmax_rows(length, seed):
    """Gates from scores of unit variance, of six channels with :data:`DECAYS`."""
    generator = torch.Generator().manual_seed(seed)
    write, read = torch.randn(2, 1, length, len(DECAYS), generator=generator).softmax(-1)
    return write, read, torch.randn(1, length, 4, generator=generator), torch.tensor(DECAYS)


@pytest.mark.parametrize("length", [33, 256, 700])
def test_gradients_are_accurate_for_small_and_large_decays(length):
    """With a small β a query reads only the position before it, and gradients nearly cancel."""
    draws = []
    for seed in range(6):
        arguments = softmax_rows(length, seed)
        fast = gradients(chunked.prefix_mean, arguments)
        slow = gradients(recurrence, [x.double() for x in arguments])
        draws.append([(a.double() - e, e) for a, e in zip(fast, slow, strict=True)])
    for number, name in enumerate(("write", "read", "values", "decay")):
        # Over draws and positions: the gradient of β is one sum, which may be near 0 by chance.
        error, norm = (
            torch.stack([draw[number][which] for draw in draws]).flatten(0, -2).norm(dim=0)
            for which in (0, 1)
        )
        assert (error / norm).max().item() < 4e-6, name


@pytest.mark.parametrize("length", [2048, pytest.param(65536, marks=pytest.mark.slow)])
def test_gradients_over_long_rows(length):
    assert largest_error(length) < 1e-5
