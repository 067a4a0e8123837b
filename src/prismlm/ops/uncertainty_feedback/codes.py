"""How uncertain a prediction is: its entropy as a share of the largest, as a code, as a vector."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError, NotFiniteError, check_whole
from prismlm.ops.tiles import at_once

NOT_A_NUMBER = (
    "these logits hold NaN or +∞, or nothing but −∞, so that their entropy is not a number: look "
    "for weights or inputs that are not finite."
)
ELEMENTS = 2**20
"""Logits that are looked at together, so that nothing of the size of all of them is made."""
LEAST = -1e4
"""The least logarithm of a probability that is told apart; its exponential is 0 in float64 too."""

NO_CODE = -1
"""What stands in place of a code where there is none: the first position, and padding."""


def normalised_entropy(
    logits: Float[Tensor, "*batch V"], *, first_position: int = 0
) -> Float[Tensor, "*batch"]:
    """Return H / ln V of the predictions, from 0 (certain) to 1 (uniform); float32.

        H = −Σ_v p_v ln p_v,   p = softmax(ℓ)

    in nats, without gradient. Logits of −∞ have no part in it. Float64 stays float64.

    Source: PRISMA, output side. The source clamps probabilities at 1e-9, which changes nothing
    that can be seen.

    Args:
        logits: ℓ.
        first_position: where the first of logits [B, T, V] stands in its row, for the error.

    Raises:
        InputError: fewer than two tokens to choose from, or logits of a position that hold NaN or
            +∞ or are −∞ throughout. In a compiled graph and on a GPU that is a RuntimeError.
    """
    vocabulary = logits.shape[-1] if logits.ndim else 0
    if vocabulary < 2:
        raise InputError(
            f"logits are {list(logits.shape)}: expected [..., V] with at least 2 tokens to choose "
            "from."
        )
    rows = logits.detach().reshape(-1, vocabulary)
    step = max(1, at_once(rows, ELEMENTS) // vocabulary)
    if len(rows) <= step:
        below = _below_uniform(rows)
    else:
        below = torch.cat([_below_uniform(part) for part in torch.split(rows, step)])
    shares = below.view(logits.shape[:-1]).div_(-math.log(vocabulary)).add_(1).clamp_(0, 1)
    if torch.compiler.is_compiling() or shares.is_cuda:
        # Looking at a value would cut the graph in two, or wait for the GPU. Not a public name:
        check = torch._assert_async  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        check(torch.isfinite(shares).all(), NOT_A_NUMBER)
    elif math.isnan(float(shares.sum())):
        places = (~torch.isfinite(shares)).nonzero()
        at = [int(i) for i in places[0]]
        where = f"index {at}"
        if len(at) == 2:
            where = f"row {at[0]}, position {at[1] + first_position}"
        raise NotFiniteError(f"{NOT_A_NUMBER} First at {where}; {len(places)} of {shares.numel()}.")
    return shares


def _below_uniform(rows: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Return ln V − H = Σ_v p_v (ln p_v + ln V) of each row in nats, 0 of a uniform one."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    # Never −∞, which times 0 is not a number; NaN stays.
    logs = rows.log_softmax(-1, dtype=dtype).clamp_min_(LEAST)
    return logs.exp().mul_(logs.add_(math.log(rows.shape[-1]))).sum(-1)


def entropy_codes(
    logits: Float[Tensor, "*batch V"], levels: int, *, first_position: int = 0
) -> Int64[Tensor, "*batch"]:
    """Return the code of the entropy of each prediction, ⌊(levels − 1) H / ln V⌋.

    Source: PRISMA, output side.

    Raises:
        InputError: as :func:`normalised_entropy` and :func:`quantise`.
    """
    return quantise(normalised_entropy(logits, first_position=first_position), levels)


def quantise(share: Float[Tensor, "*batch"], levels: int) -> Int64[Tensor, "*batch"]:
    """Return ⌊share · (levels − 1)⌋: codes from 0 to levels − 1.

    Source: PRISMA, output side, which rounds down.

    Raises:
        InputError: levels that are no whole number from 2 on.
    """
    check_levels(levels)
    return (share * (levels - 1)).long().clamp_(0, levels - 1)


def neutral_code(levels: int) -> int:
    """Return the code that stands for an unknown entropy, ⌊levels / 2⌋.

    Source: PRISMA, input side.

    Raises:
        InputError: levels that are no whole number from 2 on.
    """
    check_levels(levels)
    return levels // 2


def check_levels(levels: object) -> int:
    """Return levels as an int; raise InputError for what is no whole number from 2 on."""
    return check_whole("the number of levels of uncertainty", levels, 2)


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
    known = (codes != NO_CODE)[..., None]
    held = codes.clamp_min(0)
    if rows == levels:
        return F.embedding(held, table) * known
    # Exact in integers: a float32 place loses codes beyond 2²⁴ / K.
    scaled = held * (rows - 1)
    below = torch.div(scaled, levels - 1, rounding_mode="floor").clamp_max(rows - 2)
    # In float16 already 65,535 is infinite.
    exact = torch.promote_types(table.dtype, torch.float32)
    share = ((scaled - below * (levels - 1)).to(exact) / (levels - 1)).to(table.dtype)[..., None]
    lower, upper = (F.embedding(at, table) for at in (below, below + 1))
    return torch.lerp(lower, upper, share) * known


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
