"""Routing a tile of states at a time: no N×K matrix in the forward or the backward pass.

Gradients touch the chosen (state, prototype) pairs only. Every sum over them is a bag of weighted
rows, so that nothing of shape [N, k, d] is formed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.precision import at_least_float32
from prismlm.ops.prototype_head.choice import (
    ABSENT,
    candidates,
    cosines_of,
    largest,
    masked,
    product,
    score_dtype,
    search,
    slack,
    tile_rows,
    window_best,
)
from prismlm.ops.prototype_head.routing import (
    Nearest,
    Routing,
    check_arguments,
    inverse_norms,
    unit_rows,
)

# Where few states are read, a product goes faster with the many rows on the left.
FEW_STATES = 8


def route(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
    mask: Bool[Tensor, " N"] | None = None,
) -> Routing:
    """Route every state to its k nearest prototypes (PRISM, "Positive similarity scoring").

    c_ni = cos(z_n, p_i), α_ni = ReLU(scale · c_ni) for the k largest c_ni, in descending order. A
    low-precision product may choose them; cosines, activations and gradients are float32 (float64
    for float64 input) and touch the N·k + K chosen pairs only. No shape depends on the data, and
    nothing waits for the device.

    Args:
        z: hidden states.
        prototypes: the bank P, any norms; a zero row has cosine 0 to everything.
        k: prototypes per token.
        scale: τ > 0, a number or a scalar tensor.
        mask: False leaves a state out of ``nearest_point``.

    Raises:
        InputError: k > K, widths that differ, or a mask of another shape or dtype.
    """
    check_arguments(z, prototypes, k, mask)
    unit_z, unit_p = (unit_rows(at_least_float32(x)) for x in (z, prototypes))
    if not len(z):
        none, nobody = unit_z.new_empty(0, k), unit_p.new_full((len(unit_p),), -1)
        return Routing(none.long(), none, none, none[:, 0], nobody.long(), nobody)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        found = search(unit_z, unit_p, k, mask)
    cosines, point_cosine = cast(
        "tuple[Tensor, Tensor]",
        _ChosenCosines.apply(unit_z, unit_p, *found),  # pyright: ignore[reportUnknownMemberType]
    )
    indices, _, point, _ = found
    if mask is not None:
        some = mask.any()
        point, point_cosine = torch.where(some, point, -1), torch.where(some, point_cosine, -1)
    activations = torch.relu(scale * cosines)
    return Routing(indices, cosines, activations, cosines[:, 0], point, point_cosine)


def reconstruct(routing: Routing, prototypes: Float[Tensor, "K d"]) -> Float[Tensor, "N d"]:
    """Return ẑ_n = Σ_i α_ni p_i without gathering [N, k, d] rows."""
    weights = routing.activations
    rows = prototypes.to(weights.dtype)
    return cast("Tensor", _WeightedSum.apply(weights, rows, routing.indices))  # pyright: ignore[reportUnknownMemberType]


def gather_sum(
    indices: Int64[Tensor, "N k"], weights: Float[Tensor, "N k"], rows: Float[Tensor, "K d"]
) -> Float[Tensor, "N d"]:
    """Return Σ_j weights_nj rows[indices_nj]."""
    return F.embedding_bag(indices, rows, per_sample_weights=weights.contiguous(), mode="sum")


def scatter_sum(
    indices: Int64[Tensor, "N k"],
    count: int,
    *parts: tuple[Float[Tensor, "N k"], Float[Tensor, "N d"]],
) -> Float[Tensor, "K d"]:
    """Return Σ weights_nj rows_n over the pairs with indices_nj = i, for every i < count.

    Of several (weights, rows) the sums are added; the pairs are sorted once.
    """
    target, order = indices.flatten().sort()
    source = order // indices.shape[1]
    offsets = torch.searchsorted(target, torch.arange(count, device=target.device))
    total: Tensor | None = None
    for weights, rows in parts:
        own = weights.flatten()[order]
        found = F.embedding_bag(
            source, rows.contiguous(), offsets, per_sample_weights=own, mode="sum"
        )
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


class _ChosenCosines(torch.autograd.Function):
    """Hands out cosines that a search has found, with gradients for those pairs only."""

    @staticmethod
    def forward(
        ctx: Any,
        unit_z: Tensor,
        unit_p: Tensor,
        indices: Tensor,
        cosines: Tensor,
        point: Tensor,
        point_cosines: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(unit_z, unit_p, indices, point)
        return cosines, point_cosines

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        unit_z, unit_p, indices, point = ctx.saved_tensors
        of_cosines, of_points = grads[0], grads[1][:, None]
        to_z = gather_sum(indices, of_cosines, unit_p).index_add_(0, point, unit_p * of_points)
        to_p = scatter_sum(indices, len(unit_p), (of_cosines, unit_z))
        return to_z, to_p.addcmul_(unit_z[point], of_points), None, None, None, None


class _WeightedSum(torch.autograd.Function):
    """:func:`gather_sum` with the gradients of weights and rows, as sums over the same pairs.

    ``embedding_bag`` has them too, at twice the time on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(weights, rows, indices)
        return gather_sum(indices, weights, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, rows, indices = ctx.saved_tensors
        grad = grads[0].contiguous()
        to_rows = scatter_sum(indices, len(rows), (weights, grad))
        return cosines_of(grad, rows, indices), to_rows, None


@torch.no_grad()
def nearest(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
    inverse: Float[Tensor, "K 1"] | None = None,
) -> Nearest:
    """Return what :func:`route` does of states alone, from a float32 product.

    It writes no normalised copy of the prototypes, which for one state takes as long as its scores.
    ``inverse`` are their :func:`inverse_norms`, where they are known.

    Raises:
        InputError: k > K, or widths that differ.
    """
    check_arguments(z, prototypes, k)
    z, prototypes = at_least_float32(z), at_least_float32(prototypes)
    inverse = inverse_norms(prototypes) if inverse is None else inverse.to(z.dtype)
    with torch.autocast(z.device.type, enabled=False):
        parts = [
            largest(scores_of(states * inverse_norms(states), prototypes).mul_(inverse.T), k)
            for states in torch.split(z, tile_rows(z, len(prototypes)))
        ]
    cosines, indices = (torch.cat(column) for column in zip(*parts, strict=True))
    return Nearest(indices, cosines, torch.relu(scale * cosines))


def scores_of(
    states: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"]
) -> Float[Tensor, "N K"]:
    """Return Z Pᵀ; a product of few rows with many columns takes up to three times as long."""
    few = len(states) <= FEW_STATES
    return (prototypes @ states.T).T.contiguous() if few else states @ prototypes.T


class WindowScan(NamedTuple):
    """Routing of the N owned positions, and the positions that windows enter for a prototype.

    Attributes:
        indices: the nearest prototypes of every owned position, in the order of ``owned``.
        cosines: to those.
        window: which window a candidate comes from.
        offset: its position in the window.
        prototype: what it is a candidate for.
        cosine: to that.
    """

    indices: Int64[Tensor, "N k"]
    cosines: Float[Tensor, "N k"]
    window: Int64[Tensor, " M"]
    offset: Int64[Tensor, " M"]
    prototype: Int64[Tensor, " M"]
    cosine: Float[Tensor, " M"]


@torch.no_grad()
def scan_windows(
    z: Float[Tensor, "B T d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    owned: Bool[Tensor, "B T"],
    threshold: Float[Tensor, " K"] | None = None,
) -> WindowScan:
    """Route owned positions and find the best of each window that reach a prototype's threshold.

    What indexing needs from one product: for every window b and prototype i, the owned t with the
    largest cos(z_bt, p_i), where that is at least threshold_i (None: always). A long window that is
    read in pieces may give one for each; the better of them is what one piece would give.

    Raises:
        InputError: shapes that do not fit, or k > K.
    """
    if z.ndim != 3 or owned.shape != z.shape[:2]:
        raise InputError(
            f"scan_windows expects z [B, T, d] and owned [B, T], got {list(z.shape)} "
            f"and {list(owned.shape)}."
        )
    check_arguments(z.flatten(0, 1), prototypes, k)
    with torch.autocast(z.device.type, enabled=False):
        unit_z, unit_p = (unit_rows(at_least_float32(x)) for x in (z.flatten(0, 1), prototypes))
        if threshold is None:
            threshold = unit_p.new_full((len(unit_p),), ABSENT)
        low = score_dtype(unit_z, unit_p)
        low_z, low_p = unit_z.to(low).view(z.shape), unit_p.to(low)
        lowest = (threshold - slack(low, z.shape[2])).clamp_min(ABSENT / 2)
        many = candidates(k, len(unit_p), low, unit_z)
        chosen, row, prototype = _scan(low_z, low_p, many, owned, lowest)
        own = unit_z[owned.flatten()]
        cosines, order = cosines_of(own, unit_p, chosen).topk(k, dim=1)
        cosine = cosines_of(unit_z, unit_p, prototype[:, None], row).squeeze(1)
    kept = cosine >= threshold[prototype]
    row, length = row[kept], z.shape[1]
    indices = chosen.gather(1, order)
    return WindowScan(indices, cosines, row // length, row % length, prototype[kept], cosine[kept])


def _scan(
    z: Tensor, bank: Tensor, many: int, owned: Tensor, lowest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return candidates [N, many] of owned positions, and row and prototype of windows' best."""
    length, rows = z.shape[1], tile_rows(z, len(bank))
    windows, step = max(1, rows // length), min(rows, length)
    columns: list[Tensor] = []
    best: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(z), windows):
        for start in range(0, length, step):
            part = slice(first, first + windows), slice(start, start + step)
            own = owned[part].flatten()
            scores = product(z[part].flatten(0, 1), bank)
            columns.append(largest(scores, many)[1][own])
            scores = masked(scores, own).view(*owned[part].shape, -1)
            window, offset, prototype = window_best(scores, lowest)
            best.append(((first + window) * length + start + offset, prototype))
    row, prototype = (torch.cat(part) for part in zip(*best, strict=True))
    row, order = row.sort(stable=True)
    return torch.cat(columns), row, prototype[order]
