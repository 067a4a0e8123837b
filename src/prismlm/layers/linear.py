"""The effective matrix of a linear layer, with adapters or quantisation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def weight_of(linear: nn.Module, like: Float[Tensor, "*batch n"]) -> Float[Tensor, "m n"]:
    """Return W of x ↦ W x, whatever module stands in for the linear layer.

    For a module other than ``nn.Linear``, such as PEFT's, it is computed with gradients from the
    unit vectors, in the dtype of ``like`` (an input of the layer), so that an adapter also counts
    in W's transpose. Biases are excluded. With dropout all positions share one draw.
    """
    if type(linear) is nn.Linear:
        return linear.weight
    width = like.shape[-1]
    units_and_zero = torch.eye(width + 1, width, dtype=like.dtype, device=like.device)
    images = linear(units_and_zero)
    return (images[:-1] - images[-1:]).T
