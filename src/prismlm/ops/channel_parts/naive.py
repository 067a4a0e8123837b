"""Channel and token parts straight from their sums: for tests and for reading, not for speed."""

from __future__ import annotations

import math

from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.ops.channel_parts.matrix import ChannelFlow, check_arguments
from prismlm.ops.prototype_mixer.state import EMPTY_BELOW


def channel_parts(
    flow: ChannelFlow, position: int, directions: Float[Tensor, "C D"]
) -> Float[Tensor, "C R"]:
    """Return the channels' parts; same contract as :func:`matrix.channel_parts`."""
    check_arguments(flow, position, directions)
    parts = flow.log_decay.new_zeros(len(directions), flow.write.shape[1]).double()
    for k in range(parts.shape[1]):
        own = _carried(flow, k)
        for j in range(position):
            given = directions[:, own].double() @ flow.values[j, own].double()
            parts[:, k] += _share(flow, position, j, k) * given
    return parts


def token_parts(
    flow: ChannelFlow,
    position: int,
    directions: Float[Tensor, "C D"],
    channels: Int64[Tensor, " C"],
) -> Float[Tensor, "C t"]:
    """Return the tokens' parts of a channel each; same contract as :func:`matrix.token_parts`."""
    check_arguments(flow, position, directions)
    parts = flow.log_decay.new_zeros(len(directions), position).double()
    for c, k in enumerate(map(int, channels)):
        own = _carried(flow, k)
        for j in range(position):
            for delta in range(min(len(flow.kernel), j + 1)):
                given = flow.kernel[delta, own] * flow.inputs[j - delta, own] * directions[c, own]
                parts[c, j - delta] += _share(flow, position, j, k) * given.double().sum()
    return parts


def _carried(flow: ChannelFlow, channel: int) -> slice:
    """Return which values a channel carries."""
    channels, width = flow.write.shape[1], flow.values.shape[1] // flow.groups
    group = channel * flow.groups // channels
    return slice(group * width, (group + 1) * width)


def _share(flow: ChannelFlow, i: int, j: int, k: int) -> float:
    """Return read_ik · weight_jk."""

    def left(j: int) -> float:
        between = float(flow.log_decay[i, k]) - float(flow.log_decay[j, k])
        return math.exp(between) * float(flow.write[j, k])

    mass = sum(left(j) for j in range(i)) if flow.normalise else 1.0
    return float(flow.read[i, k]) * left(j) / mass if mass >= EMPTY_BELOW else 0.0
