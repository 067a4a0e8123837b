"""Moving a state along its prototypes: z′ = z + Σ_e (α′_e − α_e) p_e over E edited prototypes."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def activations_of(
    indices: Int64[Tensor, "N k"],
    activations: Float[Tensor, "N k"],
    chosen: Int64[Tensor, " E"],
    num_prototypes: int,
) -> Float[Tensor, "N E"]:
    """Return the activation of each chosen prototype in each state; 0 where it is not routed.

    Args:
        indices: routed prototypes, all different in a row.
        activations: their activations α.
        chosen: E prototypes, all different.
        num_prototypes: K.
    """
    count = len(chosen)
    column = torch.full((num_prototypes,), count, device=chosen.device)
    column[chosen] = torch.arange(count, device=chosen.device)
    spread = activations.new_zeros(len(indices), count + 1)
    # What was not chosen all falls into the last column, which is dropped.
    return spread.scatter(1, column[indices], activations)[:, :count]


def move(
    z: Float[Tensor, "N d"], rows: Float[Tensor, "E d"], change: Float[Tensor, "N E"]
) -> Float[Tensor, "N d"]:
    """Return z + change · rows; a state whose changes are all zero keeps every bit.

    The sum is formed in float32, or float64 for float64 states, and rounded once to z's dtype.
    """
    moved = z.to(rows.dtype) + change @ rows
    return torch.where((change != 0).any(1, keepdim=True), moved.to(z.dtype), z)
