"""Channel and token parts of one position's reading, by matrix products, in float64.

Memory is (R + n·C)·T numbers for C directions, not T·T·R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import check_whole
from prismlm.ops.prototype_mixer.chunked import EMPTY_BELOW
from prismlm.ops.tensors import check_axes


class ChannelFlow(NamedTuple):
    """What determines each position's reading from R channels, for one sequence.

    When position i reads, exp(log_decay_i − log_decay_j) remains of what position j wrote.

    Attributes:
        write, read: the gates.
        log_decay: cumulative sum of the logarithms of decays, i·ln β_k for constant ones; float64.
        values: v_j, the values written: the inputs after the convolution.
        inputs: values of each token before the convolution.
        kernel: v_j = Σ_δ kernel_δ ⊙ inputs_{j−δ}; one row of ones without a convolution.
        normalise: whether sums are divided by their mass.
        groups: number of groups; each has an equal share of channels and of the D values.
    """

    write: Float[Tensor, "T R"]
    read: Float[Tensor, "T R"]
    log_decay: Float[Tensor, "T R"]
    values: Float[Tensor, "T D"]
    inputs: Float[Tensor, "T D"]
    kernel: Float[Tensor, "n D"]
    normalise: bool = True
    groups: int = 1


def channel_parts(
    flow: ChannelFlow, position: int, directions: Float[Tensor, "C D"]
) -> Float[Tensor, "C R"]:
    """Return each channel's part of the dot product of position i's reading with y_c.

        part_ck = read_ik Σ_{j<i} weight_jk (v_j·y_c),
        weight_jk = exp(log_decay_ik − log_decay_jk) write_jk / M_ik

    M_ik is the sum of the weights' numerators, or 1 without ``normalise``; a channel with a mass
    below 1e-30 is empty. The parts sum to y_c·Σ_k read_ik S_ik / M_ik, with S_ik as in
    :func:`prismlm.ops.prototype_mixer.prefix_mean`.
    """
    weights = _grouped(_weights(flow, position, directions), flow)
    values = _grouped(flow.values[:position].double(), flow)
    products = torch.einsum("cgd,tgd->cgt", _grouped(directions.double(), flow), values)
    return torch.einsum("cgt,tgr->cgr", products, weights).flatten(1)


def token_parts(
    flow: ChannelFlow,
    position: int,
    directions: Float[Tensor, "C D"],
    channels: Int64[Tensor, " C"],
) -> Float[Tensor, "C t"]:
    """Return each earlier token's share of the part of channel k_c, for each direction y_c.

        part_cs = read_ik Σ_δ weight_{s+δ,k} (kernel_δ ⊙ inputs_s)·y_c,   s + δ < i,  k = k_c

    A convolution also adds a token to the values of later positions; those count for the token. The
    shares sum to the channel's part.
    """
    weights = _weights(flow, position, directions)[:, channels].T
    width = flow.values.shape[1] // flow.groups
    group_of_value = torch.arange(flow.values.shape[1], device=channels.device) // width
    group_of_channel = channels // (flow.write.shape[1] // flow.groups)
    in_group = group_of_value == group_of_channel[:, None]
    directions = torch.where(in_group, directions.double(), 0.0)
    inputs = flow.inputs[:position].double()
    parts = weights.new_zeros(len(directions), position)
    for delta, tap in enumerate(flow.kernel[:position].double()):
        products = (directions * tap) @ inputs[: position - delta].T
        parts[:, : position - delta] += weights[:, delta:] * products
    return parts


def _weights(flow: ChannelFlow, position: int, directions: Tensor) -> Float[Tensor, "t R"]:
    """Return read_ik · weight_jk of every earlier position j; check the other arguments."""
    check_whole("the position", position, 0, len(flow.values) - 1)
    check_axes(values=("T D", flow.values), directions=("C D", directions))
    past = slice(0, position)
    remaining = (flow.log_decay[position] - flow.log_decay[past]).double().exp()
    weight = remaining * flow.write[past].double()
    if flow.normalise:
        mass = weight.sum(0)
        weight = torch.where(mass >= EMPTY_BELOW, weight / mass, 0.0)
    return weight * flow.read[position].double()


def _grouped(columns: Tensor, flow: ChannelFlow) -> Tensor:
    rows, width = columns.shape
    return columns.view(rows, flow.groups, width // flow.groups)
