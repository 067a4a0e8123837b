"""Tiles of a GPU's size and its way of adding up blocks, run on a CPU: they change no result."""

import pytest
import torch

from prismlm.layers import PrototypeHead
from prismlm.ops import tiles
from prismlm.ops.prototype_mixer import prefix_mean
from tests.helpers.prefix_rows import inputs, state_of


@pytest.fixture
def both(monkeypatch):
    """Run a function both ways."""

    def run(function):
        found = []
        for cached in (True, False):
            monkeypatch.setattr(tiles, "in_cache", lambda like, cached=cached: cached)
            found.append(function())
        return found

    return run


@pytest.mark.parametrize("length", [1, 31, 33, 300, 1100])
@pytest.mark.parametrize("how", ["plain", "state", "masked", "groups"])
def test_prefix_means_with_their_gradients(both, length, how):
    given = [x.double() for x in inputs(2, length, 6, 12)]
    groups = 3 if how == "groups" else 1
    state = state_of(2, 6, 12 // groups) if how != "plain" else None
    flags = {"mask": torch.rand(2, length) < 0.7} if how == "masked" else {}
    if length > 1:
        given[3] = given[3].clone()
        given[3][0] = 0.01  # forgets within a block

    def means():
        write, read, values, decay = own = [x.clone().requires_grad_() for x in given]
        held = None if state is None else type(state)(*(x.double() for x in state))
        out, end = prefix_mean(write, read, values, decay, held, groups=groups, **flags)
        loss = out.square().sum() + end.sums.sum() + end.mass.square().sum()
        return [out, *end, *torch.autograd.grad(loss, own)]

    for one, other in zip(*both(means), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_fitted_heads_with_their_gradients(both):
    torch.manual_seed(0)
    # More states than a CPU solves together.
    z, bank = torch.randn(150, 16), torch.randn(90, 16)

    def rebuilt():
        head = PrototypeHead(16, 90, 20, weights="fitted")
        head.place_on(bank)
        output = head(z)
        loss = output.reconstruction.square().mean()
        return [output.reconstruction, torch.autograd.grad(loss, head.prototypes)[0]]

    for one, other in zip(*both(rebuilt), strict=True):
        torch.testing.assert_close(one, other)
