"""Spherical k-means, vector by vector: for tests and for reading."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.ops.spherical_kmeans.tiled import Clusters, check_arguments


def spherical_kmeans(
    vectors: Float[Tensor, "N d"], centres: Float[Tensor, "K d"], iterations: int
) -> Clusters:
    """Cluster as :func:`tiled.spherical_kmeans` does, one vector after the other."""
    check_arguments(vectors, centres, iterations)
    unit = vectors.float() * inverse_norms(vectors.float())
    centres = centres.float() * inverse_norms(centres.float())
    objective: list[float] = []

    def assign() -> list[tuple[float, int]]:
        found: list[tuple[float, int]] = []
        for vector in unit:
            cosines = [float(vector @ centre) for centre in centres]
            best = max(range(len(cosines)), key=lambda i: (cosines[i], -i))
            found.append((cosines[best], best))
        return found

    nearest = assign()
    for _ in range(iterations):
        worst = sorted(range(len(unit)), key=lambda n: nearest[n][0])
        moved: list[Tensor] = []
        for i in range(len(centres)):
            members = [unit[n] for n, (_, owner) in enumerate(nearest) if owner == i]
            total = torch.stack(members).sum(0) if members else unit[worst.pop(0)]
            moved.append(total * inverse_norms(total))
        centres = torch.stack(moved)
        nearest = assign()
        objective.append(sum(cosine for cosine, _ in nearest) / len(nearest))
    return Clusters(centres, torch.tensor([owner for _, owner in nearest]), torch.tensor(objective))
