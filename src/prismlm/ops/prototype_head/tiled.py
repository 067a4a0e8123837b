"""Routing in tiles of rows: no N×K matrix in the forward or the backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.prototype_head.routing import (
    Routing,
    check_arguments,
    inverse_norms,
    score_dtype,
)

# A tile of scores stays in the second-level cache of one core.
TILE_ELEMENTS = 2**20
# Candidates kept beyond k, so that near-ties at the edge can be ranked again without a full row.
SPARE = 8


def route(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
    mask: Bool[Tensor, " N"] | None = None,
) -> Routing:
    """Route every state to its k nearest prototypes (PRISM, "Positive similarity scoring").

    c_ni = cos(z_n, p_i), α_ni = ReLU(scale · c_ni) for the k largest c_ni, ties to the lower
    index. The indices equal those of :func:`naive.route`: pairs of scores closer than the
    rounding error of the matrix product are ranked again in float64. Gradients touch the
    N·k + K selected pairs only.

    Args:
        z: hidden states. bf16 and fp16 are ranked in float32 of those values.
        prototypes: the bank P, any non-zero norms; a zero row has cosine 0 to everything.
        k: prototypes per token.
        scale: τ > 0, a number or a scalar tensor.
        mask: False leaves a state out of ``nearest_point``.

    Raises:
        InputError: k > K, widths that differ, or a mask of another shape or dtype.
    """
    check_arguments(z, prototypes, k, mask)
    dtype = score_dtype(z.dtype)
    z, prototypes = z.to(dtype), prototypes.to(dtype)
    with torch.no_grad():
        search = _search(z, prototypes, k, mask)
    cosines, nearest_point_cosine = cast(
        "tuple[Tensor, Tensor]",
        _SelectedCosines.apply(z, prototypes, *search),  # pyright: ignore[reportUnknownMemberType]
    )
    return Routing(
        search.indices,
        cosines,
        torch.relu(scale * cosines),
        cosines[:, 0],
        search.nearest_point,
        nearest_point_cosine,
    )


def reconstruct(routing: Routing, prototypes: Float[Tensor, "K d"]) -> Float[Tensor, "N d"]:
    """Return ẑ_n = Σ_i α_ni p_i without gathering [N, k, d] rows."""
    weights = routing.activations
    return F.embedding_bag(
        routing.indices, prototypes.to(weights.dtype), per_sample_weights=weights, mode="sum"
    )


class WindowScan(NamedTuple):
    """Routing of every position, and each window's best position for every prototype."""

    indices: Int64[Tensor, "B T k"]
    cosines: Float[Tensor, "B T k"]
    best_cosine: Float[Tensor, "B K"]
    best_offset: Int64[Tensor, "B K"]


@torch.no_grad()
def scan_windows(
    z: Float[Tensor, "B T d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    owned: Bool[Tensor, "B T"],
) -> WindowScan:
    """Route windows and keep, per window and prototype, the best owned position.

    What indexing needs from one product per window: best_cosine_bi = max over owned t of
    cos(z_bt, p_i) and the first such t; −2 and −1 where a window owns nothing. A window's
    scores depend on its own shape [T, d] alone, not on its neighbours in the batch.
    """
    if z.ndim != 3 or owned.shape != z.shape[:2]:
        raise InputError(
            f"scan_windows expects z [B, T, d] and owned [B, T], got {list(z.shape)} "
            f"and {list(owned.shape)}."
        )
    check_arguments(z.flatten(0, 1), prototypes, k)
    dtype = score_dtype(z.dtype)
    z, prototypes = z.to(dtype), prototypes.to(dtype)
    unit_p = prototypes * inverse_norms(prototypes)
    windows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for states, own in zip(z, owned, strict=True):
        unit_z = states * inverse_norms(states)
        scores = unit_z @ unit_p.T
        values, indices = _top(scores, states, prototypes, k)
        best, offset = _best_rows(scores.masked_fill_(~own[:, None], -2.0))
        windows.append((indices, values, best, offset.masked_fill(best == -2.0, -1)))
    return WindowScan(*(torch.stack(parts) for parts in zip(*windows, strict=True)))


class _Search(NamedTuple):
    indices: Tensor
    cosines: Tensor
    nearest_point: Tensor
    nearest_point_cosine: Tensor


def _search(z: Tensor, prototypes: Tensor, k: int, mask: Tensor | None) -> _Search:
    n, count = z.shape[0], prototypes.shape[0]
    unit_p = prototypes * inverse_norms(prototypes)
    indices = torch.empty(n, k, dtype=torch.int64, device=z.device)
    cosines = torch.empty(n, k, dtype=z.dtype, device=z.device)
    best = torch.full((count,), -2.0, dtype=z.dtype, device=z.device)
    best_row = torch.full((count,), -1, dtype=torch.int64, device=z.device)
    rows = max(16, TILE_ELEMENTS // count)
    for start in range(0, n, rows):
        tile = slice(start, min(start + rows, n))
        unit_z = z[tile] * inverse_norms(z[tile])
        scores = unit_z @ unit_p.T
        cosines[tile], indices[tile] = _top(scores, z[tile], prototypes, k)
        if mask is not None and not mask[tile].all():
            scores.masked_fill_(~mask[tile, None], -2.0)
        tile_best, tile_row = _best_rows(scores)
        better = tile_best > best
        best = torch.where(better, tile_best, best)
        best_row = torch.where(better, tile_row + start, best_row)
    return _Search(indices, cosines, best_row, best.clamp_min(-1.0))


def _best_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return each column's maximum and the first row that has it.

    Comparing with the maximum is over ten times faster on a CPU than max with indices down columns.
    """
    best = scores.amax(0)
    row, column = (scores == best).nonzero(as_tuple=True)
    first = torch.full_like(best, scores.shape[0], dtype=torch.int64)
    return best, first.scatter_reduce_(0, column, row, "amin")


def _top(scores: Tensor, z: Tensor, prototypes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best cosines and indices of every row, exactly ordered.

    A float32 product of unit vectors is within (d + 8) u of the true cosine, u = 2⁻²⁴ (float64:
    2⁻⁵³). Rows in which two neighbouring candidates are closer than twice that are ranked again
    in float64.
    """
    count, width = prototypes.shape
    spread = min(k + SPARE, count)
    values, candidates = scores.topk(spread, dim=1)
    margin = (width + 8) * torch.finfo(scores.dtype).eps
    edge = min(k + 1, spread)
    doubtful = (values[:, : edge - 1] - values[:, 1:edge] <= margin).any(1)
    top, indices = values[:, :k].clone(), candidates[:, :k].clone()
    rows = doubtful.nonzero().squeeze(1)
    if rows.numel():
        # Where even the last spare is too close to the k-th, any prototype might belong.
        open_end = (spread < count) & (values[rows, k - 1] - values[rows, -1] <= margin)
        for chosen, columns in (
            (rows[~open_end], candidates[rows[~open_end]]),
            (rows[open_end], None),
        ):
            if chosen.numel():
                top[chosen], indices[chosen] = _rank_exactly(z[chosen], prototypes, columns, k)
    return top, indices


def _rank_exactly(
    z: Tensor, prototypes: Tensor, columns: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """Rank the given candidate columns (None: all) of each row by float64 cosines."""
    dtype = z.dtype
    z = z.double()
    z = z * inverse_norms(z)
    if columns is None:
        p = prototypes.double()
        p = p * inverse_norms(p)
        columns = torch.arange(p.shape[0], device=z.device).expand(z.shape[0], -1)
        # Rounded to float32, a float64 product ties where it should; in float64 it may not.
        exact = z @ p.T if dtype == torch.float32 else torch.stack([(r * p).sum(-1) for r in z])
    else:
        columns = columns.sort(dim=1).values
        p = prototypes[columns].double()
        exact = (z[:, None] * (p * inverse_norms(p))).sum(-1)
    rounded = exact.to(dtype)
    # Columns ascend, so a stable sort leaves ties with the lower index first.
    order = rounded.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return rounded.gather(1, order), columns.gather(1, order)


class _SelectedCosines(torch.autograd.Function):
    """Hands out cosines that the search has found, with gradients for those pairs only."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        prototypes: Tensor,
        indices: Tensor,
        cosines: Tensor,
        nearest_point: Tensor,
        nearest_point_cosine: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(z, prototypes, indices, nearest_point)
        return cosines, nearest_point_cosine

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Project the gradients of unit vectors: ∂c/∂z = (p̂ − c ẑ)/‖z‖, and likewise for p."""
        grad_cosines, grad_points = grads
        z, prototypes, indices, nearest_point = ctx.saved_tensors
        inverse_z, inverse_p = inverse_norms(z), inverse_norms(prototypes)
        unit_z, unit_p = z * inverse_z, prototypes * inverse_p
        with torch.enable_grad():
            leaf = unit_p.detach().requires_grad_()
            pulled = F.embedding_bag(
                indices, leaf, per_sample_weights=grad_cosines.contiguous(), mode="sum"
            )
            to_p = cast("Tensor", torch.autograd.grad(pulled, leaf, unit_z)[0])
        to_z = pulled.detach()
        found = (nearest_point >= 0).nonzero().squeeze(1)
        rows, weights = nearest_point[found], grad_points[found, None]
        to_z.index_add_(0, rows, weights * unit_p[found])
        to_p[found] += weights * unit_z[rows]
        grad_z = (to_z - (to_z * unit_z).sum(-1, keepdim=True) * unit_z) * inverse_z
        grad_p = (to_p - (to_p * unit_p).sum(-1, keepdim=True) * unit_p) * inverse_p
        return grad_z, grad_p, None, None, None, None
