"""The state of the prefix mean between calls, and the checks that its forms share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError, NotFiniteError
from prismlm.ops.sequences import check_flags, check_groups

# The mass below which a channel is empty, near float32's smallest numbers.
EMPTY_BELOW = 1e-30


class PrefixState(NamedTuple):
    """The sums and mass that the next position i reads; float32 or float64.

    S_k = Σ_j β_k^(i−j) w_jk v_j and M_k = Σ_j β_k^(i−j) w_jk, v_j the D / G values of k's group.
    """

    sums: Float[Tensor, "B R width"]
    mass: Float[Tensor, "B R"]


def check_arguments(
    write: Tensor,
    read: Tensor,
    values: Tensor,
    decay: Tensor,
    state: PrefixState | None,
    mask: Tensor | None,
    starts: Tensor | None,
    groups: int = 1,
) -> None:
    """Raise InputError for shapes, groups or decays that have no prefix mean.

    Values of decays are not checked on a GPU, which would be a synchronisation, or in compiled
    code, which would be a graph break.
    """
    valid = write.ndim == values.ndim == 3 and 0 not in write.shape
    if not valid or read.shape != write.shape or values.shape[:2] != write.shape[:2]:
        raise InputError(
            f"write is {list(write.shape)}, read {list(read.shape)}, and values are "
            f"{list(values.shape)}: expected [B, T, R] twice and [B, T, D], with B, T, R ≥ 1."
        )
    batch, length, channels = write.shape
    if decay.shape != ((channels,) if decay.ndim == 1 else write.shape):
        raise InputError(
            f"decay is {list(decay.shape)}: expected [{channels}], one per channel, or "
            f"{list(write.shape)}, one for each position and channel."
        )
    readable = decay.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and not bool(((decay > 0) & (decay < 1)).all()):
        raise (NotFiniteError if bool(decay.isnan().any()) else InputError)(
            f"decays must lie between 0 and 1, both excluded; got {decay.min().item():g} to "
            f"{decay.max().item():g}. Constrain them, for example by a sigmoid and a clamp."
        )
    check_groups(groups, channels, values.shape[2])
    shape = (batch, channels, values.shape[2] // groups)
    if state is not None and (state.sums.shape != shape or state.mass.shape != shape[:2]):
        raise InputError(
            f"the state holds sums {list(state.sums.shape)} and mass {list(state.mass.shape)}, and "
            f"the input needs {list(shape)} and {list(shape[:2])}: it is of another batch or layer."
        )
    check_flags((batch, length), mask=mask, starts=starts)
