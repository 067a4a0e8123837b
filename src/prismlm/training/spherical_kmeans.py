"""Spherical k-means: clustering directions by their cosines."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError

# Cosines that are formed at a time.
TILE_ELEMENTS = 2**21


class Clusters(NamedTuple):
    """Centres and who belongs to them, for N vectors and K centres.

    Attributes:
        centres: unit vectors.
        assignment: the nearest centre of each vector.
        objective: mean cosine of the vectors to their centres after each iteration.
    """

    centres: Float[Tensor, "K d"]
    assignment: Int64[Tensor, " N"]
    objective: Float[Tensor, " iterations"]


@torch.no_grad()
def spherical_kmeans(
    vectors: Float[Tensor, "N d"], centres: Float[Tensor, "K d"], iterations: int
) -> Clusters:
    """Move centres to the mean directions of the vectors nearest to them.

        a_n = argmax_i cos(x_n, m_i)        m_i = Σ_{n: a_n = i} x̂_n / ‖Σ …‖

    A centre that no vector is nearest to moves onto the vector with the lowest cosine to its own
    centre, the next such centre onto the next such vector. The mean cosine never falls while no
    centre is empty. Vectors, N ≥ K, may have any norm; ``centres`` is where to start.

    Source: Dhillon and Modha, Concept Decompositions, Machine Learning 42, 2001.
    """
    if not 1 <= len(centres) <= len(vectors):
        raise InputError(
            f"there are {len(vectors)} vectors for {len(centres)} centres: give at least as many."
        )
    unit, centres = F.normalize(vectors.float(), dim=-1), F.normalize(centres.float(), dim=-1)
    objective: list[Tensor] = []
    best, assignment = _nearest(unit, centres)
    for _ in range(iterations):
        sums = torch.zeros_like(centres).index_add_(0, assignment, unit)
        empty = (torch.bincount(assignment, minlength=len(centres)) == 0).nonzero().squeeze(1)
        sums[empty] = unit[best.argsort(stable=True)[: len(empty)]]
        centres = F.normalize(sums, dim=-1)
        best, assignment = _nearest(unit, centres)
        objective.append(best.mean())
    return Clusters(centres, assignment, torch.stack(objective) if objective else best.new_empty(0))


def _nearest(unit: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine of each vector to its nearest centre and which one that is, by tiles."""
    tiles = torch.split(unit, max(16, TILE_ELEMENTS // len(centres)))
    best, index = zip(*((tile @ centres.T).max(1) for tile in tiles), strict=True)
    return torch.cat(best), torch.cat(index)
