"""The losses of the prototype head, unweighted (PRISM, "Loss functions")."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prismlm.ops.prototype_head.routing import Routing, inverse_norms, norm


def prototype_pull(routing: Routing) -> Float[Tensor, ""]:
    """R1 = −(1/K) Σ_i max_j c_ij: every prototype is drawn to its nearest state.

    Prototypes without a nearest state (a mask that leaves none) are left out of the mean.
    """
    found = routing.nearest_point >= 0
    return -_masked_mean(routing.nearest_point_cosine, found)


def point_pull(routing: Routing, mask: Bool[Tensor, " N"] | None = None) -> Float[Tensor, ""]:
    """R2 = −(1/N) Σ_j max_i c_ij: every state is drawn to its nearest prototype."""
    return -_masked_mean(routing.nearest_prototype_cosine, mask)


def residual(
    z: Float[Tensor, "N d"],
    reconstruction: Float[Tensor, "N d"],
    mask: Bool[Tensor, " N"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Float[Tensor, ""]:
    """RES = mean over states of ‖z − ẑ‖², averaged over the d elements or summed.

    The source calls it a mean squared error and prints a sum; ``mean`` is the default, ``sum``
    is d times that.
    """
    squared = norm(z - reconstruction).square().squeeze(-1)
    per_state = squared / z.shape[1] if reduction == "mean" else squared
    return _masked_mean(per_state, mask)


def diversity(prototypes: Float[Tensor, "K d"]) -> Float[Tensor, ""]:
    """DIV = mean over i ≠ j of cos²(p_i, p_j), through the d×d Gram matrix.

    Σ_ij (p̃_i·p̃_j)² = ‖P̃ᵀP̃‖²_F, so no K×K matrix is formed. For K > d the value is never below
    the Welch bound (K − d) / (d (K − 1)). One prototype has diversity 0. Under autocast the Gram
    matrix is a product in half precision, of relative error below 1 % of DIV.
    """
    count = prototypes.shape[0]
    if count < 2:
        return prototypes.sum() * 0
    unit = prototypes * inverse_norms(prototypes)
    gram = (unit.T @ unit).to(unit.dtype)
    diagonal = unit.square().sum(-1).square().sum()
    return (gram.square().sum() - diagonal) / (count * (count - 1))


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean() if values.numel() else values.sum()
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() / mask.sum().clamp_min(1)
