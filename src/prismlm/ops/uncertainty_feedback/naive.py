"""Entropies and vectors of codes as their equations, one position at a time; for tests."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def normalised_entropy(logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Return −Σ p ln p / ln V, p = softmax(ℓ), with 0 ln 0 = 0; float64."""
    p = logits.double().softmax(-1)
    return -torch.xlogy(p, p).sum(-1) / math.log(logits.shape[-1])


def embed_codes(
    codes: Int64[Tensor, "*batch"], table: Float[Tensor, "K d"], levels: int
) -> Float[Tensor, "*batch d"]:
    """Return the vector of each code by linear interpolation; same contract as the fast form."""
    vectors: list[Tensor] = []
    for code in map(int, codes.flatten()):
        if code < 0:
            vectors.append(torch.zeros_like(table[0]))
            continue
        x = code * (len(table) - 1) / (levels - 1)
        below = min(int(x), len(table) - 2)
        vectors.append((below + 1 - x) * table[below] + (x - below) * table[below + 1])
    return torch.stack(vectors).view(*codes.shape, table.shape[1])
