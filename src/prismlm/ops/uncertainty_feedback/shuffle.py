"""Codes given to other positions: a signal that says nothing of where it arrives."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from prismlm.ops.uncertainty_feedback.embedding import NO_CODE


def shuffle_codes(
    codes: Int64[Tensor, "*batch"], generator: torch.Generator
) -> Int64[Tensor, "*batch"]:
    """Return the codes permuted over all positions that have one; others stay without.

    Every code occurs as often as before. The generator is one of the CPU, whatever the codes are
    on, so that the order is the same on every device.
    """
    known = codes != NO_CODE
    held = codes[known]
    order = torch.randperm(len(held), generator=generator)
    return codes.masked_scatter(known, held[order.to(codes.device)])
