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
    channels = flow.write.shape[1]
    parts = flow.log_decay.new_zeros(len(directions), channels).double()
    for c, k in ((c, k) for c in range(len(directions)) for k in range(channels)):
        for j in range(position):
            given = sum(
                float(flow.values[j, d]) * float(directions[c, d]) for d in _carried(flow, k)
            )
            parts[c, k] += _share(flow, position, j, k) * given
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
    for c in range(len(channels)):
        k = int(channels[c])
        for j in range(position):
            for delta in range(min(len(flow.kernel), j + 1)):
                given = sum(
                    float(flow.kernel[delta, d] * flow.inputs[j - delta, d] * directions[c, d])
                    for d in _carried(flow, k)
                )
                parts[c, j - delta] += _share(flow, position, j, k) * given
    return parts


def _carried(flow: ChannelFlow, channel: int) -> range:
    """Return the values that a channel carries."""
    channels, width = flow.write.shape[1], flow.values.shape[1] // flow.groups
    group = channel * flow.groups // channels
    return range(group * width, (group + 1) * width)


def _share(flow: ChannelFlow, i: int, j: int, k: int) -> float:
    """Return read_ik · weight_jk."""

    def left(j: int) -> float:
        between = float(flow.log_decay[i, k]) - float(flow.log_decay[j, k])
        return math.exp(between) * float(flow.write[j, k])

    mass = sum(left(j) for j in range(i)) if flow.normalise else 1.0
    return float(flow.read[i, k]) * left(j) / mass if mass >= EMPTY_BELOW else 0.0
