"""Routing in tiles of rows: no N×K matrix in the forward or the backward pass."""

from __future__ import annotations

from importlib.util import find_spec
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prismlm.ops.prototype_head import screened
from prismlm.ops.prototype_head.exact import (
    ABSENT,
    FEW_SPARE,
    SPARE,
    Candidates,
    column_maxima,
    entries_at_least,
    full_precision,
    largest,
    margin,
    products,
    rank_rows,
    settle,
)
from prismlm.ops.prototype_head.routing import (
    Nearest,
    Routing,
    check_arguments,
    eager,
    inverse_norms,
    score_dtype,
)
from prismlm.ops.prototype_head.sparse import RowGradient, SelectedCosines, gather_sum
from prismlm.ops.tiles import at_once

# A thread's part of a tile of scores: 4 MiB, which stays in cache; smaller ones wait on each other.
TILE_ELEMENTS = 2**20
# More threads than this share a tile, so that it stays small beside N×K.
TILE_THREADS = 4


@eager
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
        z: hidden states. bf16 and fp16 are ranked in float32 of those values; where both inputs
            are bf16 and the CPU multiplies bf16, a bf16 product leaves most pairs out before.
        prototypes: the bank P, any non-zero norms; a zero row has cosine 0 to everything.
        k: prototypes per token.
        scale: τ > 0, a number or a scalar tensor.
        mask: False leaves a state out of ``nearest_point``.

    Raises:
        InputError: k > K, widths that differ, or a mask of another shape or dtype.
    """
    check_arguments(z, prototypes, k, mask)
    if torch.compiler.is_exporting():
        return _in_one_graph(z, prototypes, k, scale, mask)
    dtype = score_dtype(z.dtype)
    with torch.no_grad(), full_precision(z.device):
        found = _scan(z, prototypes, k, mask)
    # Outside, as the gradient goes back through it.
    z, prototypes = z.to(dtype), prototypes.to(dtype)
    with torch.no_grad(), full_precision(z.device):
        search = settle(found, z.detach(), prototypes.detach(), k, mask)
    cosines, nearest_point_cosine = cast(
        "tuple[Tensor, Tensor]",
        SelectedCosines.apply(z, prototypes, *search),  # pyright: ignore[reportUnknownMemberType]
    )
    return Routing(
        search.indices,
        cosines,
        torch.relu(scale * cosines),
        cosines[:, 0],
        search.nearest_point,
        nearest_point_cosine,
    )


def _in_one_graph(
    z: Tensor, prototypes: Tensor, k: int, scale: float | Tensor, mask: Tensor | None
) -> Routing:
    """Route from the whole score matrix: no shape depends on the data, as torch.export needs it.

    Scores closer than the rounding of the matrix product keep the order that it gives them.
    """
    dtype = score_dtype(z.dtype)
    z, prototypes = z.to(dtype), prototypes.to(dtype)
    scores = (z * inverse_norms(z)) @ (prototypes * inverse_norms(prototypes)).T
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    cosines = ranked[:, :k]
    columns = scores if mask is None else scores.masked_fill(~mask[:, None], ABSENT)
    best, state = columns.max(0)
    if mask is not None:
        state = torch.where(mask.any(), state, -1)
        best = torch.where(mask.any(), best, -1.0)
    return Routing(order[:, :k], cosines, torch.relu(scale * cosines), cosines[:, 0], state, best)


@torch.no_grad()
def nearest(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
    inverse: Float[Tensor, "K 1"] | None = None,
) -> Nearest:
    """Return what :func:`route` does of states alone; quicker where these are few.

    It asks nothing of the prototypes, and writes no normalised copy of them. ``inverse`` are their
    :func:`inverse_norms`, where they are known: of one state they take as long as its scores.

    Raises:
        InputError: k > K, or widths that differ.
    """
    check_arguments(z, prototypes, k)
    dtype, count = score_dtype(z.dtype), len(prototypes)
    z, prototypes = z.to(dtype), prototypes.to(dtype)
    inverse = inverse_norms(prototypes) if inverse is None else inverse.to(dtype)
    lengths, spread = inverse.squeeze(1), min(k + FEW_SPARE, count)
    parts: list[tuple[Tensor, Tensor]] = [(z.new_empty(0, k), z.new_empty(0, k, dtype=torch.long))]
    with full_precision(z.device):
        for states in torch.split(z, max(16, tile_elements(z) // count)):
            unit = states * inverse_norms(states)
            scores = products(unit, prototypes).mul_(lengths)
            parts.append(rank_rows(*largest(scores, spread), states, prototypes, k))
    cosines, indices = (torch.cat(column) for column in zip(*parts, strict=True))
    return Nearest(indices, cosines, torch.relu(scale * cosines))


def reconstruct(routing: Routing, prototypes: Float[Tensor, "K d"]) -> Float[Tensor, "N d"]:
    """Return ẑ_n = Σ_i α_ni p_i without gathering [N, k, d] rows."""
    weights = routing.activations
    rows = prototypes.to(weights.dtype)
    sums = gather_sum(routing.indices, weights, rows.detach())
    return cast(
        "Tensor",
        RowGradient.apply(sums, rows, weights.detach(), routing.indices),  # pyright: ignore[reportUnknownMemberType]
    )


def scan_tiles(z: Tensor, prototypes: Tensor, spread: int, mask: Tensor | None) -> Candidates:
    """Pass over all scores, a tile of rows at a time."""
    n, (count, width) = z.shape[0], prototypes.shape
    unit_p = prototypes * inverse_norms(prototypes)
    values = z.new_empty(n, spread)
    indices = torch.empty(n, spread, dtype=torch.int64, device=z.device)
    best = z.new_full((count,), ABSENT)
    state = torch.full((count,), -1, dtype=torch.int64, device=z.device)
    contested = torch.zeros(count, dtype=torch.bool, device=z.device)
    bound = margin(width, z.dtype)
    rows = max(1, min(max(16, tile_elements(z) // count), n))
    # One buffer for all tiles: fresh pages cost more than a tenth of the product.
    buffer = z.new_empty(rows, count)
    for start in range(0, n, rows):
        tile = slice(start, min(start + rows, n))
        scores = torch.mm(z[tile] * inverse_norms(z[tile]), unit_p.T, out=buffer[: n - start])
        values[tile], indices[tile] = largest(scores, spread)
        if mask is not None:
            scores.index_fill_(0, (~mask[tile]).nonzero().squeeze(1), ABSENT)
        maxima, tile_best = column_maxima(scores)
        contested |= (tile_best - best).abs() <= bound
        # After the first few tiles, only few prototypes find a better state in one.
        better = (tile_best > best + bound).nonzero().squeeze(1)
        row, place = entries_at_least(scores, maxima, better, tile_best[better] - bound)
        # Where several rows reach it, which one is written does not matter: `settle` chooses.
        state[better[place]] = row + start
        contested[better] = torch.bincount(place, minlength=len(better)) > 1
        best = torch.maximum(best, tile_best)
    return Candidates(values, indices, best, state, contested)


def _scan(z: Tensor, prototypes: Tensor, k: int, mask: Tensor | None) -> Candidates:
    """Pass over all scores: in a Triton kernel, screened by a bf16 product, or in tiles."""
    spread = min(k + SPARE, len(prototypes))
    if z.is_cuda and find_spec("triton") is not None:
        from prismlm.ops.prototype_head import triton_kernel

        if triton_kernel.supports(z, spread):
            return triton_kernel.scan(z, prototypes, spread, mask)
    if screened.supports(z, prototypes, k):
        found = screened.scan(z, prototypes, k, spread, mask, tile_elements(z))
        if found is not None:
            return found
    dtype = score_dtype(z.dtype)
    return scan_tiles(z.to(dtype), prototypes.to(dtype), spread, mask)


def tile_elements(like: Tensor) -> int:
    """Return how many scores a tile holds."""
    return at_once(like, TILE_ELEMENTS * min(torch.get_num_threads(), TILE_THREADS))
