"""What the prefix mean carries from one call to the next, and the checks every form shares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError, NotFiniteError
from prismlm.ops.sequences import check_flags, check_groups

# The mass below which a channel reads as empty: near there float32 runs out of exponents.
EMPTY_BELOW = 1e-30


class PrefixState(NamedTuple):
    """What a sequence has written so far, as its next position i reads it; float32 or float64.

    S_k = Σ_j β_k^(i−j) w_jk v_j of the D / G values of channel k's group, M_k = Σ_j β_k^(i−j) w_jk.
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
    """Raise InputError for shapes, groups and decays that have no prefix mean.

    Decays on a GPU and in compiled code are taken as they are: looking at them would wait for the
    one and break the other in two.
    """
    whole = write.ndim == values.ndim == 3 and 0 not in write.shape
    if not whole or read.shape != write.shape or values.shape[:2] != write.shape[:2]:
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
    looks = decay.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks and not bool(((decay > 0) & (decay < 1)).all()):
        raise (NotFiniteError if bool(decay.isnan().any()) else InputError)(
            f"decays must lie between 0 and 1, both excluded; got {decay.min().item():g} to "
            f"{decay.max().item():g}. Keep them there, for example by a sigmoid and a clamp."
        )
    check_groups(groups, channels, values.shape[2])
    held = (batch, channels, values.shape[2] // groups)
    if state is not None and (state.sums.shape != held or state.mass.shape != held[:2]):
        raise InputError(
            f"the state holds sums {list(state.sums.shape)} and mass {list(state.mass.shape)}, and "
            f"the input needs {list(held)} and {list(held[:2])}: it is of another batch or layer."
        )
    check_flags((batch, length), mask=mask, starts=starts)
