import pytest
import torch
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.layers.delta_mixer import DeltaMixer
from prismlm.ops.delta_rule import naive

WIDTH, HEADS = 12, 3


def by_hand(layer, x):
    """The class docstring, with the recurrence."""
    mixed, _ = layer.convolution(layer.qkv_projection(x))
    q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in F.silu(mixed).chunk(3, -1))
    q, k = (vectors / vectors.norm(dim=-1, keepdim=True) for vectors in (q, k))
    rates = torch.sigmoid(layer.rate_projection(x))
    out, _ = naive.delta_rule(q / (WIDTH / HEADS) ** 0.5, k, v, rates)
    out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
    return layer.output_projection(out.flatten(2)), rates


def test_it_computes_its_equation():
    layer, x = DeltaMixer(WIDTH, HEADS).double(), torch.randn(2, 70, WIDTH, dtype=torch.float64)
    expected, rates = by_hand(layer, x)
    got = layer(x, return_evidence=True)
    torch.testing.assert_close(got.output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.evidence, rates, rtol=1e-12, atol=1e-12)
    got.output.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_size_of_the_source():
    """Width 256, 4 heads: 4·256² projections, three convolutions of 4, 4 rates, a norm of 64."""
    count = sum(p.numel() for p in DeltaMixer(256, 4).parameters())
    assert count == 4 * 256**2 + 3 * 4 * 256 + 4 * 256 + 64


def test_wrong_settings_say_what_is_wrong():
    with pytest.raises(InputError, match="do not divide"):
        DeltaMixer(10, 4)
