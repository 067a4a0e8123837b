"""Channel and token parts: by hand, against the naive forms, and against the prefix mean."""

import math

import pytest
import torch
from torch.nn import functional as F

from prismlm.ops.channel_parts import ChannelFlow, channel_parts, naive, token_parts
from prismlm.ops.prototype_mixer import naive as prefix

LENGTH, CHANNELS, WIDTH = 9, 4, 6


def make_flow(taps=3, groups=1, normalise=True, per_token=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    inputs, kernel = draw(LENGTH, WIDTH), draw(taps, WIDTH)
    values = torch.zeros_like(inputs)
    for delta in range(taps):
        values[delta:] += kernel[delta] * inputs[: LENGTH - delta]
    decay = draw(LENGTH if per_token else 1, CHANNELS).sigmoid().expand(LENGTH, -1)
    write, read = (draw(LENGTH, CHANNELS).softmax(-1) for _ in range(2))
    log_decay = decay.double().log().cumsum(0)
    return ChannelFlow(write, read, log_decay, values, inputs, kernel, normalise, groups)


def test_by_hand():
    # One channel, one value, β = ½, gates of 1; v = 4, 2 without a convolution, read at the third.
    one = torch.ones(3, 1)
    inputs = torch.tensor([[4.0], [2.0], [7.0]])
    log_decay = torch.arange(3.0).double()[:, None] * math.log(0.5)
    flow = ChannelFlow(one, 0.5 * one, log_decay, inputs, inputs, torch.ones(1, 1))
    y = torch.tensor([[10.0]])
    # Left: ¼ and ½ of a mass of ¾, so ⅓·4 and ⅔·2; half of it is read, times 10.
    tokens = token_parts(flow, 2, y, torch.tensor([0]))
    torch.testing.assert_close(tokens, torch.tensor([[20 / 3, 20 / 3]]).double())
    torch.testing.assert_close(channel_parts(flow, 2, y), torch.tensor([[40 / 3]]).double())
    raw = flow._replace(normalise=False)
    torch.testing.assert_close(
        token_parts(raw, 2, y, torch.tensor([0])), torch.tensor([[5.0, 5.0]]).double()
    )
    # A convolution v_j = x_j + 3 x_{j−1}: values 4 and 14, of which 12 came from the first token.
    mixed = flow._replace(kernel=torch.tensor([[1.0], [3.0]]), values=inputs + 3 * inputs.roll(1))
    mixed.values[0] = 4
    tokens = token_parts(mixed, 2, y, torch.tensor([0]))
    torch.testing.assert_close(tokens, torch.tensor([[140 / 3, 20 / 3]]).double())
    torch.testing.assert_close(channel_parts(mixed, 2, y)[0], tokens.sum(1))


@pytest.mark.parametrize("taps", [1, 5])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
def test_as_the_double_sums_and_the_prefix_mean(taps, groups, normalise, per_token):
    flow = make_flow(taps, groups, normalise, per_token)
    directions = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    channels = torch.tensor([3, 0, 3])
    # The last position's decay acts on nothing that is read.
    decay = F.pad(flow.log_decay.diff(dim=0).exp(), (0, 0, 0, 1), value=0.5)
    tensors = (x[None].double() for x in (flow.write, flow.read, flow.values, decay))
    out, _ = prefix.prefix_mean(*tensors, normalise=normalise, groups=groups)
    for position in (0, 1, 3, LENGTH - 1):
        parts = channel_parts(flow, position, directions)
        torch.testing.assert_close(parts, naive.channel_parts(flow, position, directions))
        tokens = token_parts(flow, position, directions, channels)
        assert tokens.shape == (3, position)
        expected = naive.token_parts(flow, position, directions, channels)
        torch.testing.assert_close(tokens, expected)
        expected = parts.gather(1, channels[:, None])[:, 0]
        torch.testing.assert_close(tokens.sum(1), expected, rtol=1e-5, atol=1e-6)
        reading = channel_parts(flow, position, torch.eye(WIDTH)).sum(1)
        torch.testing.assert_close(reading, out[0, position])


def test_an_empty_channel_has_no_part():
    flow = make_flow()
    flow.write[:, 1] = 0
    # After one step less than 1e-30 of channel 2 remains.
    flow.log_decay[:, 2] = -80.0 * torch.arange(LENGTH)
    directions = torch.randn(2, WIDTH)
    parts = channel_parts(flow, 5, directions)
    assert (parts[:, 1:3] == 0).all()
    assert (parts[:, [0, 3]] != 0).all()
    assert (token_parts(flow, 5, directions, torch.tensor([1, 2])) == 0).all()
    torch.testing.assert_close(parts, naive.channel_parts(flow, 5, directions))
