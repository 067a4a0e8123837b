"""Rows with padding anywhere, as rows with all padding at their end, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor


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
        return torch.take_along_dim(tensor, self._index(self.order, tensor), 1)

    def compact_starts(self, starts: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Move starts of sequences with their tokens; one on padding goes to the next token."""
        last = starts.sum(1, keepdim=True)
        sequence = torch.where(self.mask, self.compact(starts.cumsum(1)), last)
        return torch.diff(sequence, dim=1, prepend=torch.zeros_like(last)) > 0

    def restore(self, tensor: Shaped[Tensor, "B T *rest"]) -> Shaped[Tensor, "B T *rest"]:
        """Move tokens back to where they came from, with zeros on padding."""
        back = torch.argsort(self.order, dim=1)
        filled = tensor.masked_fill(~self._index(self.mask, tensor), 0)
        return torch.take_along_dim(filled, self._index(back, tensor), 1)

    @staticmethod
    def _index(flags: Tensor, tensor: Tensor) -> Tensor:
        return flags.reshape(*flags.shape, *[1] * (tensor.ndim - 2))
