"""Channel and token parts of one position's reading, by matrix products, in float64.

Memory is that of one position: (R + n·C)·T numbers for C directions, never T·T·R."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.prototype_mixer.state import EMPTY_BELOW
from prismlm.ops.sequences import check_groups


class ChannelFlow(NamedTuple):
    """All that decides what each position of one sequence reads from R channels.

    Of what position j wrote, exp(log_decay_i − log_decay_j) is left when i reads: with one decay
    β_k for all positions log_decay_ik is i·ln β_k, and decays of each position's own add up.

    Attributes:
        write: the write gate.
        read: the read gate.
        log_decay: the sum of the logarithms of all decays up to a position; float64.
        values: v_j, what is written: the inputs after the convolution.
        inputs: what each token gives, before the convolution.
        kernel: v_j = Σ_δ kernel_δ ⊙ inputs_{j−δ}; one row of ones without a convolution.
        normalise: whether sums are divided by their mass.
        groups: into how many the channels are cut, in order; those of a group carry its equal
            share of the D values and no other.
    """

    write: Float[Tensor, "T R"]
    read: Float[Tensor, "T R"]
    log_decay: Float[Tensor, "T R"]
    values: Float[Tensor, "T D"]
    inputs: Float[Tensor, "T D"]
    kernel: Float[Tensor, "n D"]
    normalise: bool = True
    groups: int = 1


def check_arguments(flow: ChannelFlow, position: int, directions: Tensor) -> None:
    """Raise InputError for a position or directions that do not belong to the flow.

    Raises:
        InputError: no such position, directions of another width, or groups that do not divide
            channels and values.
    """
    length, width = flow.values.shape
    if not 0 <= position < length:
        raise InputError(f"there is no position {position}: the sequence has {length}.")
    if directions.ndim != 2 or directions.shape[1] != width:
        raise InputError(f"directions are {list(directions.shape)}: expected [C, {width}].")
    check_groups(flow.groups, flow.write.shape[1], width)


def channel_parts(
    flow: ChannelFlow, position: int, directions: Float[Tensor, "C D"]
) -> Float[Tensor, "C R"]:
    """Return what each channel adds to the product of a position's reading with y_c.

        part_ck = read_ik Σ_{j<i} weight_jk (v_j·y_c),
        weight_jk = exp(log_decay_ik − log_decay_jk) write_jk / M_ik

    M_ik is the sum of the weights' numerators; without ``normalise`` it is 1, and a channel whose
    mass is below 1e-30 reads as empty. Over the channels the parts sum to y_c·Σ_k read_ik S_ik /
    M_ik, with S_ik as in :func:`prismlm.ops.prototype_mixer.prefix_mean`.

    Args:
        flow: one layer's, of one sequence.
        position: i, from 0.
        directions: y_c.

    Raises:
        InputError: arguments that do not fit together.
    """
    check_arguments(flow, position, directions)
    share = _grouped(_shares(flow, position), flow)
    values = _grouped(flow.values[:position].double(), flow)
    given = torch.einsum("cgd,tgd->cgt", _grouped(directions.double(), flow), values)
    return torch.einsum("cgt,tgr->cgr", given, share).flatten(1)


def token_parts(
    flow: ChannelFlow,
    position: int,
    directions: Float[Tensor, "C D"],
    channels: Int64[Tensor, " C"],
) -> Float[Tensor, "C t"]:
    """Return what each earlier token gave to the part of one channel, for each direction y_c.

        part_cs = read_ik Σ_δ weight_{s+δ,k} (kernel_δ ⊙ inputs_s)·y_c,   s + δ < i,  k = k_c

    A convolution puts a token into the values of later positions too; the token credited is the one
    that gave the value, wherever it was written. Over the tokens the parts sum to the channel's.

    Args:
        flow: one layer's, of one sequence.
        position: i, from 0.
        directions: y_c.
        channels: k_c, the channel that is split along y_c.

    Returns:
        One number for each of the i tokens before the position.

    Raises:
        InputError: arguments that do not fit together.
    """
    check_arguments(flow, position, directions)
    share = _shares(flow, position)[:, channels].T
    width = flow.values.shape[1] // flow.groups
    group = torch.arange(flow.values.shape[1], device=channels.device) // width
    own = group == (channels // (flow.write.shape[1] // flow.groups))[:, None]
    kept = torch.where(own, directions.double(), 0.0)
    inputs = flow.inputs[:position].double()
    parts = share.new_zeros(len(directions), position)
    for delta, tap in enumerate(flow.kernel[:position].double()):
        given = (kept * tap) @ inputs[: position - delta].T
        parts[:, : position - delta] += share[:, delta:] * given
    return parts


def _shares(flow: ChannelFlow, position: int) -> Float[Tensor, "t R"]:
    """Return read_ik · weight_jk of every earlier position j."""
    past = slice(0, position)
    left = (flow.log_decay[position] - flow.log_decay[past]).double().exp()
    weight = left * flow.write[past].double()
    if flow.normalise:
        mass = weight.sum(0)
        weight = torch.where(mass >= EMPTY_BELOW, weight / mass, 0.0)
    return weight * flow.read[position].double()


def _grouped(columns: Tensor, flow: ChannelFlow) -> Tensor:
    rows, width = columns.shape
    return columns.view(rows, flow.groups, width // flow.groups)
