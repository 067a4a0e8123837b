"""Rows whose padding is moved to the end and back, and rows of several sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError


class Compaction(NamedTuple):
    """Where each row's tokens are.

    Attributes:
        order: the positions of the tokens in their order, then those of the padding.
        lengths: the number of tokens of each row.
        mask: true on the first ``lengths`` positions.
    """

    order: Int64[Tensor, "B T"]
    lengths: Int64[Tensor, " B"]
    mask: Bool[Tensor, "B T"]

    @classmethod
    def of(cls, mask: Bool[Tensor, "B T"]) -> Compaction:
        """Return the compaction that puts what ``mask`` leaves out at the end."""
        order = torch.argsort(~mask, dim=1, stable=True)
        lengths = mask.sum(1)
        return cls(
            order, lengths, torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
        )

    def compact(self, tensor: Shaped[Tensor, "B T *rest"]) -> Shaped[Tensor, "B T *rest"]:
        """Move tokens to the front of each row."""
        return taken(tensor, self.order)

    def compact_starts(self, starts: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Move starts of sequences with their tokens; one on padding goes to the next token."""
        last = starts.sum(1, keepdim=True)
        sequence = torch.where(self.mask, self.compact(starts.cumsum(1)), last)
        return torch.diff(sequence, dim=1, prepend=torch.zeros_like(last)) > 0

    def restore(self, tensor: Shaped[Tensor, "B T *rest"]) -> Shaped[Tensor, "B T *rest"]:
        """Move tokens back to where they came from, with zeros on padding."""
        back = torch.argsort(self.order, dim=1)
        return taken(tensor.masked_fill(~_beside(self.mask, tensor), 0), back)


def taken(
    tensor: Shaped[Tensor, "B T *rest"], places: Int64[Tensor, "B n"]
) -> Shaped[Tensor, "B n *rest"]:
    """Return the positions ``places`` of each row; not take_along_dim, which fixes sizes."""
    return tensor.gather(1, _beside(places, tensor).expand(-1, -1, *tensor.shape[2:]))


def _beside(flags: Tensor, tensor: Tensor) -> Tensor:
    return flags.reshape(*flags.shape, *[1] * (tensor.ndim - 2))


def compacted(
    x: Float[Tensor, "B T d"],
    width: int,
    mask: Bool[Tensor, "B T"] | None,
    starts: Bool[Tensor, "B T"] | None,
) -> tuple[Float[Tensor, "B T d"], Bool[Tensor, "B T"] | None, Compaction | None]:
    """Return rows and starts with padding at the end, and where it was; as they are without any.

    Args:
        x: of at least one row and one position.
        width: d.
        mask: False on padding.
        starts: True where a sequence starts.

    Raises:
        InputError: another shape, or flags that are not bool.
    """
    if x.ndim != 3 or x.shape[2] != width or 0 in x.shape:
        raise InputError(
            f"the input of the mixer is {list(x.shape)}: expected [B, T, {width}], with at least "
            "one row and one position."
        )
    check_flags(x.shape[:2], mask=mask, starts=starts)
    if mask is None:
        return x, starts, None
    places = Compaction.of(mask)
    return places.compact(x), None if starts is None else places.compact_starts(starts), places


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

    @classmethod
    def of(cls, starts: Int64[Tensor, "B 1 n C"]) -> Reach:
        """Return it for sequences that start where ``starts`` is 1 and not 0."""
        within = starts.cumsum(3)
        number = within + (within[..., -1:].cumsum(2) - within[..., -1:])
        last = number[..., -1]
        before = F.pad(last[..., :-1], (1, 0))
        return cls(
            number[..., None] == number[..., None, :],
            (number == before[..., None])[..., None],
            (number == last[..., None])[..., None],
            (before == last)[..., None],
        )


def check_flags(rows: tuple[int, ...], **given: Tensor | None) -> None:
    """Raise InputError for flags that are not bool, one for each position of ``rows`` [B, T]."""
    for name, flags in given.items():
        if flags is not None and (flags.shape != rows or flags.dtype != torch.bool):
            raise InputError(
                f"{name} is {flags.dtype} {list(flags.shape)}: expected torch.bool {list(rows)}, "
                f"one flag for each position. {name}.bool() makes one of zeros and ones."
            )
