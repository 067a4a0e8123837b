"""The results of routing, and the head's losses (PRISM)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


class Routing(NamedTuple):
    """The prototypes of each hidden state; float32 (float64 for float64), with gradients.

    Attributes:
        indices: the k nearest prototypes, by descending cosine; with fitted weights those of the
            pursuit, in the order of choice.
        cosines: their cosines c.
        activations: α = ReLU(scale · c); 0 if unused.
        nearest_prototype_cosine: max over prototypes, per state.
        nearest_point: the state nearest to each prototype; −1 if the mask leaves no state.
        nearest_point_cosine: its cosine; −1 if the mask leaves no state.
    """

    indices: Int64[Tensor, "N k"]
    cosines: Float[Tensor, "N k"]
    activations: Float[Tensor, "N k"]
    nearest_prototype_cosine: Float[Tensor, " N"]
    nearest_point: Int64[Tensor, " K"]
    nearest_point_cosine: Float[Tensor, " K"]


class Nearest(NamedTuple):
    """The prototypes of each state, as in :class:`Routing`."""

    indices: Int64[Tensor, "N k"]
    cosines: Float[Tensor, "N k"]
    activations: Float[Tensor, "N k"]


def inverse_norms(vectors: Float[Tensor, "... d"]) -> Float[Tensor, "... 1"]:
    """Return 1/‖v‖ per vector, and 0 for a zero row: its cosine to everything is then 0."""
    norms = cast("Tensor", torch.linalg.vector_norm(vectors, dim=-1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]
    return norms.masked_fill(norms == 0, torch.inf).reciprocal()


def unit_rows(vectors: Float[Tensor, "N d"]) -> Float[Tensor, "N d"]:
    """Return v / ‖v‖ per row; a zero row stays zero and has no gradient."""
    return cast("Tensor", _Unit.apply(vectors))  # pyright: ignore[reportUnknownMemberType]


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        inverse = inverse_norms(vectors)
        unit = vectors * inverse
        ctx.save_for_backward(unit, inverse)
        return unit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        unit, inverse = ctx.saved_tensors
        change = grads[0] * unit
        along = change.sum(-1, keepdim=True)
        # In place: allocating pages for a whole bank takes longer than its arithmetic.
        return torch.addcmul(grads[0], along, unit, value=-1, out=change).mul_(inverse)


def prototype_pull(routing: Routing) -> Float[Tensor, ""]:
    """R1 = −(1/K) Σ_i max_j c_ij: pulls every prototype to its nearest state, if there is one."""
    return -(routing.nearest_point_cosine * (routing.nearest_point >= 0)).mean()


def point_pull(routing: Routing, mask: Bool[Tensor, " N"] | None = None) -> Float[Tensor, ""]:
    """R2 = −(1/N) Σ_j max_i c_ij: pulls every state to its nearest prototype."""
    return -_masked_mean(routing.nearest_prototype_cosine, mask)


def residual(
    z: Float[Tensor, "N d"],
    reconstruction: Float[Tensor, "N d"],
    mask: Bool[Tensor, " N"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Float[Tensor, ""]:
    """RES = mean over states of ‖z − ẑ‖², averaged over the d elements or summed.

    The source calls it a mean squared error, but its equation is a sum.
    """
    squared = (z - reconstruction).square()
    return _masked_mean(squared.mean(-1) if reduction == "mean" else squared.sum(-1), mask)


def diversity(prototypes: Float[Tensor, "K d"]) -> Float[Tensor, ""]:
    """DIV = mean over i ≠ j of cos²(p_i, p_j), through the d×d Gram matrix.

    Σ_ij (p̃_i·p̃_j)² = ‖P̃ᵀP̃‖²_F, where the diagonal of non-zero rows adds 1 each. For K > d it is at
    least the Welch bound (K − d) / (d (K − 1)). Under autocast the Gram matrix is computed in half
    precision, with a relative error below 1 %.
    """
    count = prototypes.shape[0]
    if count < 2:
        return prototypes.sum() * 0
    unit = unit_rows(prototypes)
    gram = (unit.T @ unit).to(unit.dtype)
    diagonal = gram.detach().trace()
    return (gram.square().sum() - diagonal) / (count * (count - 1))


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean() if values.numel() else values.sum()
    return torch.where(mask, values, 0).sum() / mask.sum().clamp_min(1)
