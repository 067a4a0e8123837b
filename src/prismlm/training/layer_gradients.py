"""Gradient norms of a decoder's blocks, of the steps that an evaluation follows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prismlm.training import parallel
from prismlm.training.recipe import Recipe


class LayerGradients:
    """‖∂L/∂θ_ℓ‖ over all parameters θ_ℓ of block ℓ, before clipping.

    Read once an evaluation, so that other steps cost nothing, and kept in checkpoints: the last
    rows are written after the last of them.

    Attributes:
        norms: of each block at the last step that was read; NaN before.

    Args:
        blocks: of the decoder.
        recipe: says after which steps there is an evaluation.
    """

    def __init__(self, blocks: Sequence[nn.Module], recipe: Recipe) -> None:
        self._blocks = blocks
        self._every = recipe.evaluation.every
        self._steps = recipe.steps
        self.norms = [math.nan] * len(blocks)

    def read(self, step: int) -> None:
        """Take in the gradients of a step, counted from 1. Every process has to call."""
        if step == self._steps or (self._every and step % self._every == 0):
            self.norms = [_norm(block) for block in self._blocks]


@torch.no_grad()
def _norm(block: nn.Module) -> float:
    grads = [p.grad for p in block.parameters() if p.grad is not None]
    each: list[Tensor] = [parallel.full(grad.float().norm()) for grad in grads]
    return float(torch.stack(each).norm()) if each else 0.0
