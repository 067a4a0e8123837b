"""The prototype head as a module."""

import pytest
import torch
import torch.nn.functional as F

from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.ops import prototype_head as ops


def head_of(width=8, count=20, k=4, **settings):
    head = PrototypeHead(width, count, k, **settings)
    head.reset_parameters(torch.Generator().manual_seed(0))
    return head


def test_losses_exclude_padding():
    head = head_of(scale=1.5)
    z, mask = torch.randn(2, 6, 8), torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    output = head(z, mask=mask)
    losses = head.losses(z, output, mask=mask)
    torch.testing.assert_close(losses, head.losses(z[mask], head(z[mask])))
    total = head.losses(z, output, mask=mask, residual_reduction="sum").residual
    torch.testing.assert_close(total, losses.residual * 8)


def test_prototypes_placed_on_states_reconstruct_them():
    """k copies of a state, each z / (k τ), sum to it."""
    head = head_of(count=12, k=4, scale=2.0)
    states = torch.randn(3, 8).repeat_interleave(4, 0)
    head.place_on(states)
    torch.testing.assert_close(head(states).reconstruction, states)


def test_a_fitted_head_begins_with_the_nearest_and_rebuilds_better():
    z = torch.randn(30, 8, generator=torch.Generator().manual_seed(3))
    settings = {"count": 60, "k": 20}
    plain, head = head_of(**settings)(z), head_of(**settings, weights="fitted")
    fitted = head(z)
    first = slice(None, ops.PICKS)
    assert torch.equal(plain.routing.indices[:, first], fitted.routing.indices[:, first])
    assert not torch.equal(plain.routing.indices, fitted.routing.indices)
    torch.testing.assert_close(
        fitted.routing.cosines,
        F.cosine_similarity(z[:, None], head.prototypes[fitted.routing.indices], dim=2),
    )
    assert (fitted.routing.activations >= 0).all()
    left, best = ((z - output.reconstruction).norm(dim=1) for output in (plain, fitted))
    assert (best < left).all()
    for found, expected in zip(head.nearest(z), fitted.routing[:3], strict=True):
        torch.testing.assert_close(found, expected)


def test_norms_and_scale_do_not_change_a_fitted_reconstruction():
    z, head = torch.randn(10, 8), head_of(weights="fitted")
    expected = head(z).reconstruction
    with torch.no_grad():
        head.prototypes.mul_(torch.rand(20, 1) + 0.5)
        head.log_scale.fill_(1.3)
    found = head(z).reconstruction
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    # DistributedDataParallel would fail on a parameter without a gradient.
    assert head.log_scale.grad == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"count": 3, "k": 4}, "there are 3 prototypes"),
        ({"scale": 0.0}, "positive"),
    ],
)
def test_settings_that_make_no_head_and_too_few_states_to_place_it_on(settings, words):
    with pytest.raises(InputError, match=words):
        head_of(**settings)
    with pytest.raises(InputError, match="fewer prototypes"):
        head_of().place_on(torch.zeros(3, 8))
