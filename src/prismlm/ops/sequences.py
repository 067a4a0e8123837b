"""Rows of several packed sequences."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F


class Reach(NamedTuple):
    """Visibility within packed rows that are split into n blocks of C positions.

    Attributes:
        same: whether two positions of a block belong to the same sequence.
        seen: whether a position sees the state at its block's start.
        kept: whether the state at its block's end includes a position.
        carried: whether the state at a block's end includes the state at its start.
    """

    same: Bool[Tensor, "B 1 n C C"]
    seen: Bool[Tensor, "B 1 n C 1"]
    kept: Bool[Tensor, "B 1 n C 1"]
    carried: Bool[Tensor, "B 1 n 1"]


def reach(starts: Int64[Tensor, "B 1 n C"]) -> Reach:
    """Return the visibility for rows where ``starts`` is 1 at the first position of a sequence."""
    within = starts.cumsum(3)
    last = within[..., -1].cumsum(2)  # the sequence's index at a block's end
    before = F.pad(last[..., :-1], (1, 0))
    within = within + before[..., None]
    return Reach(
        within[..., None] == within[..., None, :],
        (within == before[..., None])[..., None],
        (within == last[..., None])[..., None],
        (before == last)[..., None],
    )
