"""What went through the channels of one layer, and the checks every form shares."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError


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
    channels = flow.write.shape[1]
    if flow.groups < 1 or channels % flow.groups or width % flow.groups:
        raise InputError(
            f"{flow.groups} groups do not divide {channels} channels and values of width {width}."
        )
