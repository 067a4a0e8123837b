"""Routing in tiles of rows: no N×K matrix in the forward or the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple, ParamSpec, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.prototype_head import screened
from prismlm.ops.prototype_head.exact import (
    ABSENT,
    SPARE,
    Candidates,
    full_precision,
    margin,
    rank_rows,
    settle,
)
from prismlm.ops.prototype_head.routing import (
    Routing,
    check_arguments,
    inverse_norms,
    score_dtype,
)
from prismlm.ops.prototype_head.selection import (
    ROW_GROUP,
    column_maxima,
    entries_at_least,
    largest,
)
from prismlm.ops.prototype_head.sparse import RowGradient, SelectedCosines, gather_sum

# A thread's part of a tile of scores: 4 MiB, which stays in cache; smaller ones wait on each other.
TILE_ELEMENTS = 2**20
# A GPU has no such cache, and every tile costs it a few launches.
CUDA_TILE_ELEMENTS = 2**25
# More threads than this share a tile, so that it stays small beside N×K.
TILE_THREADS = 4

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep a function whose shapes depend on the data out of graphs: torch.compile breaks there."""
    return cast("Callable[_P, _R]", torch.compiler.disable(function))  # pyright: ignore[reportUnknownMemberType]


@_eager
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


def reconstruct(routing: Routing, prototypes: Float[Tensor, "K d"]) -> Float[Tensor, "N d"]:
    """Return ẑ_n = Σ_i α_ni p_i without gathering [N, k, d] rows."""
    weights = routing.activations
    rows = prototypes.to(weights.dtype)
    sums = gather_sum(routing.indices, weights, rows.detach())
    return cast(
        "Tensor",
        RowGradient.apply(sums, rows, weights.detach(), routing.indices),  # pyright: ignore[reportUnknownMemberType]
    )


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

    What indexing needs from one product: for every window b and prototype i, the first of the
    owned t with the largest cos(z_bt, p_i), where that is at least threshold_i. A window that two
    tiles of rows share may give one for each; the better of them is what one tile would give.

    Args:
        z: hidden states of windows.
        prototypes: the bank.
        k: prototypes per token.
        owned: the positions to look at.
        threshold: what is not worth keeping; None keeps the best of every window.

    Raises:
        InputError: shapes that do not fit, or k > K.
    """
    if z.ndim != 3 or owned.shape != z.shape[:2]:
        raise InputError(
            f"scan_windows expects z [B, T, d] and owned [B, T], got {list(z.shape)} "
            f"and {list(owned.shape)}."
        )
    check_arguments(z.flatten(0, 1), prototypes, k)
    dtype = score_dtype(z.dtype)
    prototypes = prototypes.to(dtype)
    count = prototypes.shape[0]
    rows, kept = _whole_groups(owned)
    if threshold is None:
        threshold = prototypes.new_full((count,), ABSENT)
    step = _tile_rows(count, z.device)
    flat, length = z.flatten(0, 1), z.shape[1]
    buffer = prototypes.new_empty(min(step, len(rows)), count)
    spread = min(k + SPARE, count)
    parts: list[tuple[Tensor, ...]] = []
    with full_precision(z.device):
        unit_p = prototypes * inverse_norms(prototypes)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            states = flat[part].to(dtype)
            scores = torch.mm(states * inverse_norms(states), unit_p.T, out=buffer[: len(part)])
            cosines, indices = rank_rows(*largest(scores, spread), states, prototypes, k)
            own = kept[start : start + step]
            row, prototype, cosine = _best_of_windows(scores, part // length, threshold)
            place = part[row]
            parts.append(
                (indices[own], cosines[own], place // length, place % length, prototype, cosine)
            )
    if not parts:
        none, nothing = rows.new_empty(0), prototypes.new_empty(0)
        return WindowScan(rows.new_empty(0, k), nothing.new_empty(0, k), none, none, none, nothing)
    return WindowScan(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _tile_rows(count: int, device: torch.device) -> int:
    """Return how many rows of ``count`` scores a tile has, a multiple of the group of rows."""
    elements = TILE_ELEMENTS * min(torch.get_num_threads(), TILE_THREADS)
    if device.type == "cuda":
        elements = CUDA_TILE_ELEMENTS
    return max(ROW_GROUP, elements // count // ROW_GROUP * ROW_GROUP)


def _whole_groups(owned: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat rows that are owned, each window's filled up to whole groups of 16.

    A window's last row stands in for those that are missing, so that the maximum over a group is
    one over its window. The second result is false on these.
    """
    rows = owned.flatten().nonzero().squeeze(1)
    counts = owned.sum(1)
    filled = -(-counts // ROW_GROUP) * ROW_GROUP
    window = torch.repeat_interleave(filled)
    number = torch.arange(len(window), device=owned.device) - (filled.cumsum(0) - filled)[window]
    kept = number < counts[window]
    first = (counts.cumsum(0) - counts)[window]
    return rows[first + torch.minimum(number, counts[window] - 1)], kept


def _best_of_windows(
    scores: Tensor, window: Tensor, threshold: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, prototype and score of each window's best, where they reach the threshold."""
    count = scores.shape[1]
    maxima = scores.view(-1, ROW_GROUP, count).amax(1)
    changes = window[::ROW_GROUP].diff().ne(0)
    # The number of each group's window within the tile.
    local = torch.cat([changes.new_zeros(1), changes]).cumsum(0)
    ends = changes.nonzero().squeeze(1) + 1
    best = torch.stack([part.amax(0) for part in torch.tensor_split(maxima, ends.cpu())])
    wanted = torch.where(best >= threshold, best, torch.inf)
    group, prototype = (maxima >= wanted[local]).nonzero(as_tuple=True)
    rows = group[:, None] * ROW_GROUP + torch.arange(ROW_GROUP, device=scores.device)
    entered = scores[rows, prototype[:, None]] == maxima[group, prototype, None]
    row = group * ROW_GROUP + entered.to(torch.uint8).argmax(1)
    # Groups come in order: where two of a window tie, the first one wins.
    place = local[group] * count + prototype
    first = row.new_full((best.numel(),), len(scores)).scatter_reduce_(0, place, row, "amin")
    chosen = row == first[place]
    row, prototype = row[chosen], prototype[chosen]
    return row, prototype, scores[row, prototype]


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
    rows = max(1, min(max(16, _tile_elements() // count), n))
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
        found = screened.scan(z, prototypes, k, spread, mask, _tile_elements())
        if found is not None:
            return found
    dtype = score_dtype(z.dtype)
    return scan_tiles(z.to(dtype), prototypes.to(dtype), spread, mask)


def _tile_elements() -> int:
    return TILE_ELEMENTS * min(torch.get_num_threads(), TILE_THREADS)
