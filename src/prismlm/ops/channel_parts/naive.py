"""Channel and token parts as their sums; for tests."""

from __future__ import annotations

import math

from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.ops.channel_parts.matrix import ChannelFlow
from prismlm.ops.prototype_mixer.chunked import EMPTY_BELOW


def channel_parts(
    flow: ChannelFlow, position: int, directions: Float[Tensor, "C D"]
) -> Float[Tensor, "C R"]:
    """Return the channels' parts; same contract as :func:`matrix.channel_parts`."""
    parts = flow.log_decay.new_zeros(len(directions), flow.write.shape[1]).double()
    for k in range(parts.shape[1]):
        values = _values_of(flow, k)
        for j in range(position):
            products = directions[:, values].double() @ flow.values[j, values].double()
            parts[:, k] += _weight(flow, position, j, k) * products
    return parts


def token_parts(
    flow: ChannelFlow,
    position: int,
    directions: Float[Tensor, "C D"],
    channels: Int64[Tensor, " C"],
) -> Float[Tensor, "C t"]:
    """Return the tokens' shares of channels; same contract as :func:`matrix.token_parts`."""
    parts = flow.log_decay.new_zeros(len(directions), position).double()
    for c, k in enumerate(map(int, channels)):
        values = _values_of(flow, k)
        for j in range(position):
            for delta in range(min(len(flow.kernel), j + 1)):
                value = flow.kernel[delta, values] * flow.inputs[j - delta, values]
                product = (value * directions[c, values]).double().sum()
                parts[c, j - delta] += _weight(flow, position, j, k) * product
    return parts


def _values_of(flow: ChannelFlow, channel: int) -> slice:
    """Return the indices of the values that a channel carries."""
    channels, width = flow.write.shape[1], flow.values.shape[1] // flow.groups
    group = channel * flow.groups // channels
    return slice(group * width, (group + 1) * width)


def _weight(flow: ChannelFlow, i: int, j: int, k: int) -> float:
    """Return read_ik · weight_jk."""

    def remaining(j: int) -> float:
        log_decay = float(flow.log_decay[i, k]) - float(flow.log_decay[j, k])
        return math.exp(log_decay) * float(flow.write[j, k])

    mass = sum(remaining(j) for j in range(i)) if flow.normalise else 1.0
    return float(flow.read[i, k]) * remaining(j) / mass if mass >= EMPTY_BELOW else 0.0
