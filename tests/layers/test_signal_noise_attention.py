"""The signal/noise attention layer: its equation and its sizes."""

import math

import pytest
import torch

from prismlm.layers.signal_noise_attention import SignalNoiseAttention
from prismlm.ops.signal_noise_attention import rotate

SWITCHES = {
    "source": {},
    "R = 1": {"expansion": 1},
    "R = 4": {"expansion": 4},
    "untied": {"tied": False},
    "angle": {"scaling": "angle"},
    "one frequency": {"ratio": 1.0},
    "score by width": {"scale_by_width": True},
}
WIDTH, SIZE = 16, 4


def layer_of(**settings):
    torch.manual_seed(0)
    return SignalNoiseAttention(WIDTH, SIZE, **settings).double()


def equation(layer, z, lam, settings):
    """Eq. 7, head by head, for one sequence z [T, d]."""
    expansion = settings.get("expansion", 2)
    heads = expansion * WIDTH // SIZE
    ratio = settings.get("ratio", math.pi)
    scale = (WIDTH if settings.get("scale_by_width") else SIZE) ** -0.5
    total = torch.zeros_like(z)
    place = torch.arange(len(z))
    for head in range(heads):
        rows = slice(head * SIZE, (head + 1) * SIZE)
        dictionary = layer.projection.weight[rows].T  # U_h [d, p]
        out = dictionary
        if layer.output_projection is not None:
            out = layer.output_projection.weight[:, rows]
        factor = ratio if head < heads // 2 else 1 / ratio
        if settings.get("scaling") == "angle":
            speed = factor * 10_000.0 ** (-torch.arange(0, SIZE, 2).double() / SIZE)
        else:
            speed = (10_000.0 * factor) ** (-torch.arange(0, SIZE, 2).double() / SIZE)
        u = z @ dictionary
        turned = rotate(u, place, speed)
        scores = (scale * turned @ turned.T).masked_fill(place > place[:, None], -torch.inf)
        added = scores.softmax(-1) @ u @ out.T
        total = total + (added if head < heads // 2 else -lam * added)
    return total / math.sqrt(heads)


@pytest.mark.parametrize("name", SWITCHES)
def test_it_computes_its_equation_under_every_switch(name):
    settings = SWITCHES[name]
    layer = layer_of(**settings)
    z = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    lam = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    fast = layer(z, lam).output
    slow = torch.stack([equation(layer, row, lam, settings) for row in z])
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-8)
    g = torch.randn_like(fast)
    leaves = [z, lam, *layer.parameters()]
    gradients = (torch.autograd.grad((out * g).sum(), leaves) for out in (fast, slow))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_rotations_are_exact_in_half_precision():
    exact, dtype = SignalNoiseAttention(32, 16), torch.bfloat16
    half = SignalNoiseAttention(32, 16).to(dtype)
    assert half.projection.weight.dtype == dtype
    assert torch.equal(half.frequencies, exact.frequencies)
    far = half(torch.ones(1, 3, 32, dtype=dtype), 0.1, positions=torch.tensor([[0, 1, 900]]))
    assert far.output.dtype == dtype
    assert half.double().frequencies.dtype == torch.float64
