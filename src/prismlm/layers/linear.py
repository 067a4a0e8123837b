"""The matrix of a linear layer that something else may stand in for."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def weight_of(linear: nn.Module, like: Float[Tensor, "*batch n"]) -> Float[Tensor, "m n"]:
    """Return W of x ↦ W x, of what an adapter or a quantised layer computes in its place too.

    A plain layer's is its own parameter. Of anything else it is read off the unit vectors, with
    gradients, in the dtype of ``like``: a low-rank adapter then counts wherever W does, in its
    transpose as well. A constant that is added is no part of W. One call of the layer on n + 1
    rows; with dropout in the adapter, all positions share one draw.

    Args:
        linear: the layer.
        like: an input of it.
    """
    if type(linear) is nn.Linear:
        return linear.weight
    width = like.shape[-1]
    rows = torch.eye(width + 1, width, dtype=like.dtype, device=like.device)
    images = linear(rows)
    return (images[:-1] - images[-1:]).T
