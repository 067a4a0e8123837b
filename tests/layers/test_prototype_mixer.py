"""The mixers and their convolution: against their equations, with padding and several sequences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.layers import PrototypeMixer
from prismlm.layers.causal_convolution import CausalConvolution
from prismlm.layers.delta_mixer import DeltaMixer
from prismlm.ops.delta_rule import naive as naive_rule
from prismlm.ops.prototype_mixer import naive

WIDTH, HEADS = 12, 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SWITCHES = {
    "document": {},
    "layer 0": {"shared_gates": True, "temperature": 3.0, "convolution_width": 5},
    "layer 1": {"convolution_width": 5},
    "multiplied": {"temperature": 3.0, "temperature_mode": "multiply"},
    "no mass": {"normalise": False},
    "full rank": {"value_width": WIDTH, "convolution_width": 2},
    "groups": {"groups": 2, "temperature": 2.0, "decay_half_lives": (0.5, 40.0)},
    "by token": {"decay_mode": "token", "groups": 2},
    "by token, layer 0": {"decay_mode": "token", "shared_gates": True, "convolution_width": 3},
    "groups, layer 0": {"groups": 2, "shared_gates": True, "convolution_width": 5},
}


def mixer(**settings):
    torch.manual_seed(0)
    layer = PrototypeMixer(WIDTH, 4, **settings)
    if layer.decay_map is not None:
        nn.init.normal_(layer.decay_map)  # as after training
    return layer


def count(module):
    return sum(p.numel() for p in module.parameters())


def by_hand(layer, x):
    """The class docstring, with the double sum."""

    def gate(x, log_temperature):
        tau = log_temperature.exp()
        tau = tau if layer.gates.temperature_mode == "divide" else 1 / tau
        parts = layer.prototypes.chunk(layer.groups)
        return torch.cat([(x @ p.T / t).softmax(-1) for p, t in zip(parts, tau, strict=True)], -1)

    write = gate(x, layer.log_write_temperature)
    read = write
    if not layer.shared_gates:
        read = gate(layer.read_projection(x), layer.log_read_temperature)
    values = layer.value_projection(x)
    if layer.convolves:
        values, _ = layer.convolution(values)
    options = {"normalise": layer.normalise, "groups": layer.groups}
    decay = layer.decay
    if layer.decay_map is not None:
        decay = (layer.decay_logits + x @ layer.decay_map.T).sigmoid().clamp(1e-6, 1 - 1e-6)
    out, _ = naive.prefix_mean(write, read, values, decay, **options)
    return layer.alpha * layer.output_projection(out), write, read


@pytest.mark.parametrize("name", SWITCHES)
def test_it_computes_its_equation_under_every_switch(name):
    layer = mixer(**SWITCHES[name]).double()
    with torch.no_grad():  # different temperatures per group, as after training
        layer.log_write_temperature += 0.3 * torch.arange(layer.groups)
    x = torch.randn(2, 70, WIDTH, dtype=torch.float64)
    output, write, read = by_hand(layer, x)
    got = layer(x, return_evidence=True)
    torch.testing.assert_close((got.output, *got.evidence), (output, write, read), **EXACT)
    assert layer(x).evidence is None
    parameters = list(layer.parameters())
    slow, fast = (torch.autograd.grad(y.square().sum(), parameters) for y in (output, got.output))
    for e, a in zip(slow, fast, strict=True):
        assert e.abs().max() > 0
        assert (e - a).norm() <= 1e-12 * e.norm()
    single = layer.float()(x.float()).output
    torch.testing.assert_close(single.double(), output, rtol=1e-4, atol=1e-5)


def test_initial_values():
    layer = mixer()
    assert layer.alpha.item() == 1.0
    assert layer.log_write_temperature.item() == layer.log_read_temperature.item() == 0.0
    assert layer.value_projection.weight.shape == (WIDTH // 2, WIDTH)
    assert half_lives(layer) == pytest.approx([13.51] * 4, abs=0.01)
    assert mixer(temperature=3.0).log_write_temperature.exp().item() == pytest.approx(3)


def half_lives(layer):
    return (-math.log(2) / layer.decay.log()).tolist()


def test_half_lives_spread_over_the_channels_of_each_group():
    for settings, expected in (
        ({"decay_half_lives": (1.0, 64.0)}, [1, 4, 16, 64]),
        ({"decay_half_lives": (1.0, 64.0), "groups": 2}, [1, 64, 1, 64]),
        ({"decay_half_lives": (8.0, 2.0), "groups": 4, "value_width": 4}, [4, 4, 4, 4]),
    ):
        assert half_lives(mixer(**settings)) == pytest.approx(expected, rel=1e-4)


def test_decays_by_token_are_initially_those_of_channels():
    torch.manual_seed(0)
    by_token = PrototypeMixer(WIDTH, 4, decay_mode="token", decay_half_lives=(1.0, 9.0))
    channel = PrototypeMixer(WIDTH, 4, decay_half_lives=(1.0, 9.0))
    channel.load_state_dict({k: v for k, v in by_token.state_dict().items() if k != "decay_map"})
    assert count(by_token) == count(channel) + 4 * WIDTH
    x = torch.randn(2, 30, WIDTH)
    output = by_token(x).output
    torch.testing.assert_close(output, channel(x).output)
    output.square().sum().backward()
    assert (by_token.decay_map.grad.abs() > 0).all()


def test_sizes_of_the_source():
    """Width 256, 32 channels: 139,939 in total, with 65,536 of W and 640 of the convolution."""
    full = PrototypeMixer(256, 32, convolution_width=5)
    assert count(full) == 139_939
    shared = {"shared_gates": True, "temperature": 3.0}
    assert count(PrototypeMixer(256, 32, convolution_width=5, **shared)) == 139_939 - 65_537
    assert count(PrototypeMixer(256, 32)) == 139_939 - 640
    complete = PrototypeMixer(256, 32, **shared, keep_unused=True)
    assert count(complete) == 139_939
    frozen = {name for name, p in complete.named_parameters() if not p.requires_grad}
    assert frozen == {"read_projection.weight", "log_read_temperature", "convolution.weight"}


@pytest.mark.parametrize("name", SWITCHES)
def test_padding_and_packing_change_nothing(name):
    """Two sequences of one row, with padding, equal each of them alone."""
    layer, x = mixer(**SWITCHES[name]).double(), torch.randn(1, 20, WIDTH, dtype=torch.float64)
    mask, starts = torch.ones(1, 20, dtype=torch.bool), torch.zeros(1, 20, dtype=torch.bool)
    mask[0, [0, 1, 4, 8, 15, 19]], starts[0, 9] = False, True
    got = layer(x, mask=mask, starts=starts, return_evidence=True)
    alone = [layer(x[:, at][mask[:, at]][None]) for at in (slice(9), slice(9, 20))]
    torch.testing.assert_close(got.output[mask], torch.cat([part.output[0] for part in alone]))
    torch.testing.assert_close(got.state, alone[1].state)
    assert not got.output[~mask].any()
    assert not got.evidence.write[~mask].any()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay": 1.0}, "must start between 0 and 1"),
        ({"groups": 2, "channels": 3}, "2 groups of 3 channels and values"),
        ({"decay_half_lives": (1.0, math.inf)}, "expected two half-lives"),
        ({"convolution_width": -1}, "width of a convolution is -1: expected"),
        ({"temperature": 0.0}, "temperature τ is 0.0: expected a positive number"),
        ({"decay_mode": "tokens"}, "Did you mean 'token'"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(InputError, match=words):
        PrototypeMixer(**{"width": WIDTH, "channels": 2} | settings)
    with pytest.raises(InputError, match="do not divide"):
        DeltaMixer(10, 4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [PrototypeMixer, DeltaMixer])
def test_wrong_inputs(kind):
    layer, x = kind(16, 4), torch.randn(1, 3, 16)
    with pytest.raises(InputError, match=r"expected \[B, T, 16\], with at least one row"):
        layer(x[0])
    with pytest.raises(InputError, match="another batch or"):
        layer(x, state=layer(x.expand(2, -1, -1)).state)
    for name in ("mask", "starts"):
        with pytest.raises(InputError, match=f"{name} is .*: expected"):
            layer(x, **{name: torch.ones(1, 3)})


def delta_by_hand(layer, x):
    """The class docstring, with the recurrence."""
    mixed, _ = layer.convolution(layer.qkv_projection(x))
    q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in F.silu(mixed).chunk(3, -1))
    q, k = (vectors / vectors.norm(dim=-1, keepdim=True) for vectors in (q, k))
    rates = torch.sigmoid(layer.rate_projection(x))
    out, _ = naive_rule.delta_rule(q / (WIDTH / HEADS) ** 0.5, k, v, rates)
    out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
    return layer.output_projection(out.flatten(2)), rates


def test_the_delta_mixer_computes_its_equation():
    layer, x = DeltaMixer(WIDTH, HEADS).double(), torch.randn(2, 70, WIDTH, dtype=torch.float64)
    expected, rates = delta_by_hand(layer, x)
    got = layer(x, return_evidence=True)
    torch.testing.assert_close((got.output, got.evidence), (expected, rates), **EXACT)
    got.output.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_size_of_the_delta_mixer():
    """Width 256, 4 heads: 4·256² projections, three convolutions of 4, 4 rates, a norm of 64."""
    assert count(DeltaMixer(256, 4)) == 4 * 256**2 + 3 * 4 * 256 + 4 * 256 + 64


@given(
    length=st.integers(1, 20),
    width=st.integers(1, 5),
    padded=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_convolution_mixes_a_token_with_the_last_ones_of_its_sequence(
    length, width, padded, packed, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    history = torch.randn(2, width - 1, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, length, generator=generator) < 0.6
    starts = torch.rand(2, length, generator=generator) < 0.2
    x[~mask] = x[~mask] if not padded else torch.nan
    layer = CausalConvolution(3, width).double()
    flags = {"mask": mask} if padded else {}
    flags |= {"starts": starts} if packed else {}
    out, kept = layer(x, history=history, **flags)
    for b in range(2):
        # A start on padding is one of the token behind it.
        number = [0] * (width - 1) + (starts[b].cumsum(0) * packed).tolist()
        places = [i for i in range(length) if mask[b, i] or not padded]
        values = [*history[b], *(x[b, i] for i in places)]
        number = [*number[: width - 1], *(number[width - 1 + i] for i in places)]
        for at, place in enumerate(places):
            own = at + width - 1
            expected = sum(
                layer.weight[delta] * values[own - delta]
                for delta in range(width)
                if number[own - delta] == number[own]
            )
            torch.testing.assert_close(out[b, place], expected)
        last = int(starts[b].sum()) if packed else 0
        ends = range(len(values) - width + 1, len(values))
        expected = [values[i] if number[i] == last else torch.zeros(3).double() for i in ends]
        torch.testing.assert_close(list(kept[b]), expected)


def test_a_convolution_without_and_with_padding_by_hand():
    layer = CausalConvolution(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [10.0]]))
    x = torch.tensor([[[9.0], [1.0], [9.0], [2.0], [9.0]]])
    mask = torch.tensor([[False, True, False, True, False]])
    out, kept = layer(x, mask=mask)
    assert layer(x)[0].flatten().tolist() == [9.0, 91.0, 19.0, 92.0, 29.0]
    assert out[mask].flatten().tolist() == [1.0, 12.0]
    assert kept.flatten().tolist() == [2.0]
