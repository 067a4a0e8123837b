"""Rows of positions that hold padding, or several sequences one after the other, and groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError


def check_flags(rows: tuple[int, ...], **flags: Tensor | None) -> None:
    """Raise InputError for flags that are not bool, one for each position of ``rows`` [B, T]."""
    for name, own in flags.items():
        if own is not None and (own.shape != rows or own.dtype != torch.bool):
            raise InputError(
                f"{name} is {own.dtype} {list(own.shape)}: expected torch.bool {list(rows)}, "
                f"one flag for each position. {name}.bool() makes one of zeros and ones."
            )


def check_groups(groups: int, channels: int, value_width: int) -> None:
    """Raise InputError unless ``groups`` parts share channels and values equally."""
    if groups < 1 or channels % groups or value_width % groups:
        raise InputError(
            f"{groups} groups of {channels} channels and values of width {value_width}: expected a "
            "number of groups that divides both."
        )


class Reach(NamedTuple):
    """What sees what in n blocks of C positions of rows that hold several sequences.

    Attributes:
        same: whether two positions of a block are of one sequence.
        seen: whether a position sees what is before its block.
        kept: whether what is behind a block sees a position.
        carried: whether what is before a block is seen from behind it.
    """

    same: Bool[Tensor, "B 1 n C C"]
    seen: Bool[Tensor, "B 1 n C 1"]
    kept: Bool[Tensor, "B 1 n C 1"]
    carried: Bool[Tensor, "B 1 n 1"]


def reach(starts: Int64[Tensor, "B 1 n C"]) -> Reach:
    """Return the reach of positions where sequences start at each 1 of ``starts``."""
    within = starts.cumsum(3)
    last = within[..., -1].cumsum(2)  # numbers of sequences; 0 is the one before the first start
    before = F.pad(last[..., :-1], (1, 0))
    within = within + before[..., None]
    return Reach(
        within[..., None] == within[..., None, :],
        (within == before[..., None])[..., None],
        (within == last[..., None])[..., None],
        (before == last)[..., None],
    )
