"""Entropy, codes and their vectors as the equations say, one position at a time; for tests."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def normalised_entropy(logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Return −Σ p ln p / ln V, p = softmax(ℓ), with 0 ln 0 = 0; float64."""
    rows = logits.reshape(-1, logits.shape[-1]).double()
    found: list[float] = []
    for row in rows:
        shares = [float(p) for p in row.softmax(0)]
        found.append(-sum(p * math.log(p) for p in shares if p) / math.log(len(shares)))
    return torch.tensor(found, dtype=torch.float64).view(logits.shape[:-1])


def embed_codes(
    codes: Int64[Tensor, "*batch"], table: Float[Tensor, "K d"], levels: int
) -> Float[Tensor, "*batch d"]:
    """Return the vector of each code by linear interpolation; same contract as the fast form."""
    found: list[Tensor] = []
    for code in map(int, codes.flatten()):
        if code < 0:
            found.append(torch.zeros_like(table[0]))
            continue
        place = code * (len(table) - 1) / (levels - 1)
        below = min(int(place), len(table) - 2)
        share = place - below
        found.append((1 - share) * table[below] + share * table[below + 1])
    return torch.stack(found).view(*codes.shape, table.shape[1])
