"""The entropy of a prediction: normalised, as a code, and as a vector."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import NotFiniteError
from prismlm.ops.tensors import working_dtype
from prismlm.ops.tiles import at_once

NOT_A_NUMBER = (
    "these logits contain NaN or +∞, or only −∞, so that their entropy is not a number: check "
    "weights and inputs for values that are not finite."
)
ELEMENTS = 2**20  # logits per tile
MIN_LOG = -1e4  # the smallest logarithm of a probability; its exponential is 0 in float64

NO_CODE = -1
"""In place of a code where there is none: the first position, and padding."""


def normalised_entropy(logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Return H / ln V of the predictions, from 0 (certain) to 1 (uniform), without gradient.

        H = −Σ_v p_v ln p_v,   p = softmax(ℓ)

    float32, or float64 for float64. Logits of −∞ are ignored. Logits whose entropy is not a number
    raise InputError, in compiled graphs and on a GPU RuntimeError.

    Source: PRISMA, output side, which clamps probabilities at 1e-9, without a visible effect.
    """
    vocabulary = logits.shape[-1]
    rows = logits.detach().reshape(-1, vocabulary)
    step = max(1, at_once(rows, ELEMENTS) // vocabulary)
    deficit = torch.cat([_below_uniform(tile) for tile in torch.split(rows, step)])
    entropy = deficit.view(logits.shape[:-1]).div_(-math.log(vocabulary)).add_(1).clamp_(0, 1)
    if torch.compiler.is_compiling() or entropy.is_cuda:
        # Reading a value would break the graph, or synchronise with the GPU.
        check = torch._assert_async  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        check(torch.isfinite(entropy).all(), NOT_A_NUMBER)
    elif math.isnan(float(entropy.sum())):
        raise NotFiniteError(NOT_A_NUMBER)
    return entropy


def _below_uniform(rows: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Return ln V − H = Σ_v p_v (ln p_v + ln V) of each row in nats."""
    # Not −∞, which times 0 is NaN; NaN stays.
    logs = rows.log_softmax(-1, dtype=working_dtype(rows)).clamp_min_(MIN_LOG)
    return logs.exp().mul_(logs.add_(math.log(rows.shape[-1]))).sum(-1)


def entropy_codes(logits: Float[Tensor, "*batch V"], levels: int) -> Int64[Tensor, "*batch"]:
    """Return the code of each prediction's entropy, ⌊(levels − 1) H / ln V⌋ (PRISMA)."""
    return quantise(normalised_entropy(logits), levels)


def quantise(share: Float[Tensor, "*batch"], levels: int) -> Int64[Tensor, "*batch"]:
    """Return ⌊share · (levels − 1)⌋: codes from 0 to levels − 1."""
    return (share * (levels - 1)).long().clamp_(0, levels - 1)


def neutral_code(levels: int) -> int:
    """Return the code for an unknown entropy, ⌊levels / 2⌋ (PRISMA)."""
    return levels // 2


def embed_codes(
    codes: Int64[Tensor, "*batch"], table: Float[Tensor, "K d"], levels: int
) -> Float[Tensor, "*batch d"]:
    """Return the vector of each code from 0 to levels − 1, and zeros for :data:`NO_CODE`.

        x = c (K − 1) / (levels − 1),   j = min(⌊x⌋, K − 2),   (j + 1 − x) E_j + (x − j) E_{j+1}

    With K = levels rows this is row c. With fewer, codes between two rows are interpolated, so
    that rare codes learn from their neighbours.

    Source: PRISMA, input side, for K = levels; interpolation is ours.
    """
    rows = len(table)
    known = (codes != NO_CODE)[..., None]
    codes = codes.clamp_min(0)
    if rows == levels:
        return F.embedding(codes, table) * known
    # In integers: float32 cannot distinguish codes beyond 2²⁴ / K.
    scaled = codes * (rows - 1)
    below = torch.div(scaled, levels - 1, rounding_mode="floor").clamp_max(rows - 2)
    # In float16, 65,535 is already infinite.
    wide = torch.promote_types(table.dtype, torch.float32)
    fraction = ((scaled - below * (levels - 1)).to(wide) / (levels - 1)).to(table.dtype)
    lower, upper = (F.embedding(row, table) for row in (below, below + 1))
    return torch.lerp(lower, upper, fraction[..., None]) * known


def shuffle_codes(
    codes: Int64[Tensor, "*batch"], generator: torch.Generator
) -> Int64[Tensor, "*batch"]:
    """Return the codes permuted among all positions that have one.

    The generator is on the CPU, so that the order is the same on every device.
    """
    known = codes != NO_CODE
    values = codes[known]
    order = torch.randperm(len(values), generator=generator)
    return codes.masked_scatter(known, values[order.to(codes.device)])
