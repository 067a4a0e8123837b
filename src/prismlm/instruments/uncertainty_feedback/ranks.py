"""Rank correlation within strata, with a null that leaves every value in its stratum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from prismlm.errors import InputError

PERMUTATIONS = 999
CHUNK = 256


@dataclass(frozen=True)
class MatchedRanks:
    """x and y of n texts at P positions, compared among texts at the same position.

    Attributes:
        correlation: Σ x̂ ŷ / √(Σ x̂² Σ ŷ²), x̂ and ŷ ranks among the texts at a position, less
            their mean; 0 where either never differs.
        by_text: n times each text's part of it: their mean is the correlation.
        p: of both sides, (1 + as large under permutation) / (1 + permutations).
    """

    correlation: float
    by_text: np.ndarray
    p: float


def matched_ranks(
    x: Float[np.ndarray, "n P"],
    y: Float[np.ndarray, "n P"],
    *,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> MatchedRanks:
    """Correlate x with y by rank within positions.

    Under the null the texts' rows of x may be exchanged: every x stays at its position, and what
    goes together along a text stays together, which shuffling each position by itself would tear
    apart, for too small p.

    Args:
        x: of text i at position j.
        y: likewise.
        permutations: of rows; the same for the same n and seed.
        seed: of the permutations.

    Raises:
        InputError: shapes that differ, fewer than two texts, or figures that are not finite.
    """
    if x.shape != y.shape or x.ndim != 2 or len(x) < 2:
        raise InputError(
            f"figures {list(x.shape)} and {list(y.shape)}: expected [texts, positions] twice, of "
            "at least 2 texts."
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("figures to be ranked are not finite.")
    texts = len(x)
    own, other = _centred_ranks(x), _centred_ranks(y)
    norm = float(np.sqrt((own**2).sum() * (other**2).sum()))
    if not norm:
        return MatchedRanks(0.0, np.zeros(texts), 1.0)
    # Of row i of y with row π(i) of x.
    products = other @ own.T / norm
    found = float(np.trace(products))
    rng = np.random.default_rng(seed)
    rows, larger = np.arange(texts), 0
    for first in range(0, permutations, CHUNK):
        count = min(CHUNK, permutations - first)
        orders = rng.permuted(np.tile(rows, (count, 1)), axis=1)
        null = products[rows, orders].sum(1)
        # Beyond rounding: the same sum in another order is as large.
        larger += int((np.abs(null) >= abs(found) - 1e-12).sum())
    return MatchedRanks(found, texts * np.diagonal(products), (1 + larger) / (1 + permutations))


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's ρ of all values together; 0 where either never differs."""
    own, other = (_centred_ranks(a.reshape(-1, 1)) for a in (x, y))
    norm = float(np.sqrt((own**2).sum() * (other**2).sum()))
    return float((own * other).sum() / norm) if norm else 0.0


def _centred_ranks(values: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n P"]:
    """Return each column's ranks, ties sharing their mean, less their mean."""
    found = np.empty(values.shape)
    for column in range(values.shape[1]):
        _, place, count = np.unique(values[:, column], return_inverse=True, return_counts=True)
        last = np.cumsum(count)
        found[:, column] = (last - (count - 1) / 2)[place]
    return found - (len(values) + 1) / 2
