"""Codes of uncertainty as vectors, from a row for each code or from fewer rows between codes."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.uncertainty_feedback.entropy import check_levels

NO_CODE = -1
"""What stands in place of a code where there is none: the first position, and padding."""


def embed_codes(
    codes: Int64[Tensor, "*batch"], table: Float[Tensor, "K d"], levels: int
) -> Float[Tensor, "*batch d"]:
    """Return the vector of each code, and zeros where there is none.

        x = c (K − 1) / (levels − 1),   j = min(⌊x⌋, K − 2),   (j + 1 − x) E_j + (x − j) E_{j+1}

    With K = levels rows this is row c. With fewer, codes between two rows are interpolated, so
    that rarely seen ones learn from their neighbours.

    Source: PRISMA, input side, for K = levels; interpolation is ours.

    Args:
        codes: c, from 0 to levels − 1, or :data:`NO_CODE`.
        table: E, K from 2 to levels rows.
        levels: of the codes.

    Raises:
        InputError: fewer than two levels, or a table of fewer than 2 or more than ``levels`` rows.
    """
    check_levels(levels)
    rows = table.shape[0] if table.ndim == 2 else 0
    if not 2 <= rows <= levels:
        raise InputError(
            f"the table is {list(table.shape)} for {levels} levels: expected [K, d] with K from 2 "
            f"to {levels}."
        )
    if rows == levels and _is_known(codes):
        return torch.nn.functional.embedding(codes, table)
    known = (codes != NO_CODE)[..., None]
    held = codes.clamp_min(0)
    if rows == levels:
        return torch.nn.functional.embedding(held, table) * known
    # Exact in integers: a float32 place loses codes beyond 2²⁴ / K.
    scaled = held * (rows - 1)
    below = torch.div(scaled, levels - 1, rounding_mode="floor").clamp_max(rows - 2)
    # In float16 already 65,535 is infinite.
    exact = torch.promote_types(table.dtype, torch.float32)
    share = ((scaled - below * (levels - 1)).to(exact) / (levels - 1)).to(table.dtype)[..., None]
    lower, upper = (torch.nn.functional.embedding(at, table) for at in (below, below + 1))
    return torch.lerp(lower, upper, share) * known


def _is_known(codes: Tensor) -> bool:
    """Say whether it is seen at no cost that there is a code: the one of a decoding step is."""
    if not codes.is_cpu or codes.numel() != 1 or torch.compiler.is_compiling():
        return False
    return int(codes) != NO_CODE
