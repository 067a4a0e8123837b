"""Sums over selected (state, prototype) pairs, with the gradients of cosines and reconstruction.

Gradients touch those pairs only. Every sum is a bag of weighted rows: nothing of shape [N, k, d] is
formed, and none is added to by several threads at once, so that results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor


def gather_sum(
    indices: Int64[Tensor, "N k"], weights: Float[Tensor, "N k"], rows: Float[Tensor, "K d"]
) -> Float[Tensor, "N d"]:
    """Return Σ_j weights_nj rows[indices_nj]."""
    return F.embedding_bag(indices, rows, per_sample_weights=weights.contiguous(), mode="sum")


def scatter_sum(
    target: Int64[Tensor, " E"],
    source: Int64[Tensor, " E"],
    weights: Float[Tensor, " E"],
    rows: Float[Tensor, "N d"],
    count: int,
) -> Float[Tensor, "K d"]:
    """Return Σ_e weights_e rows[source_e] for every target 0 … count − 1."""
    target, order = target.sort(stable=True)
    offsets = torch.searchsorted(target, torch.arange(count, device=target.device))
    return F.embedding_bag(
        source[order], rows.contiguous(), offsets, per_sample_weights=weights[order], mode="sum"
    )


class SelectedCosines(torch.autograd.Function):
    """Hands out cosines that a search has found, with gradients for those pairs only."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        prototypes: Tensor,
        indices: Tensor,
        cosines: Tensor,
        nearest_point: Tensor,
        nearest_point_cosine: Tensor,
        inverse_z: Tensor,
        inverse_p: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return both cosines as they are."""
        found = indices, cosines, nearest_point, nearest_point_cosine, inverse_z, inverse_p
        ctx.save_for_backward(z, prototypes, *found)
        return cosines, nearest_point_cosine

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """∂c/∂z = (p̂ − c ẑ)/‖z‖ and ∂c/∂p = (ẑ − c p̂)/‖p‖, summed over the pairs."""
        grad_cosines, grad_points = grads
        z, prototypes, indices, cosines, nearest_point, point_cosines, *rest = ctx.saved_tensors
        inverse_z, inverse_p = rest
        # A prototype without a nearest state passes nothing on.
        grad_points = grad_points * (nearest_point >= 0)
        point = nearest_point.clamp_min(0)
        n, k = indices.shape
        each = torch.arange(len(prototypes), device=z.device)
        target = torch.cat([indices.flatten(), each])
        source = torch.cat([torch.arange(n, device=z.device).repeat_interleave(k), point])
        weights = torch.cat([grad_cosines.flatten(), grad_points])
        along = weights * torch.cat([cosines.flatten(), point_cosines])

        grad_z = gather_sum(indices, grad_cosines * inverse_p[indices, 0], prototypes)
        grad_z.index_add_(0, point, prototypes * (grad_points[:, None] * inverse_p))
        grad_p = scatter_sum(target, source, weights * inverse_z[source, 0], z, len(prototypes))
        for grad, vectors, inverse, pairs in (
            (grad_z, z, inverse_z, source),
            (grad_p, prototypes, inverse_p, target),
        ):
            radial = torch.zeros_like(inverse).index_add_(0, pairs, along[:, None])
            grad.mul_(inverse).addcmul_(vectors, radial * inverse.square(), value=-1)
        return grad_z, grad_p, None, None, None, None, None, None


class RowGradient(torch.autograd.Function):
    """Hands on a sum Σ_j w_nj rows[indices_nj] taken of detached rows, with the rows' gradient.

    ``embedding_bag`` has that gradient too, at twice the time on a CPU, and on a GPU in no fixed
    order of summation.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, rows: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Return the sums as they are."""
        ctx.save_for_backward(weights, indices)
        ctx.count = rows.shape[0]
        return sums.view_as(sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """∂/∂rows_i = Σ w_nj over the pairs that selected i."""
        (grad,) = grads
        weights, indices = ctx.saved_tensors
        n, k = indices.shape
        source = torch.arange(n, device=grad.device).repeat_interleave(k)
        to_rows = scatter_sum(indices.flatten(), source, weights.flatten(), grad, ctx.count)
        return grad, to_rows, None, None
