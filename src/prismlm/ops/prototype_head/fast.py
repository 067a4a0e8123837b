"""Routing a tile of states at a time: no N×K matrix in the forward or the backward pass.

A product in bf16 (float16 on a GPU), within 1.5 ε of the cosine, selects k + ``SPARE`` candidates,
which are ranked by float32 cosines; closer pairs may come in any order. Only the selected (state,
prototype) pairs have gradients. Sums over them are embedding bags: nothing is [N, k, d].
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import check_whole
from prismlm.ops.prototype_head.routing import Nearest, Routing, inverse_norms, unit_rows
from prismlm.ops.tensors import at_least_float32, check_axes
from prismlm.ops.tiles import at_once

warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
# Up to this many states, a product is faster with prototypes on the left.
FEW_STATES = 8
# Candidates beyond k after a low-precision product.
SPARE = 8
# Added to the scores of masked states, which are then below all others.
MASKED_SCORE = -4.0
# Scores per tile: 16 MiB on a CPU, 512 MiB on a GPU.
TILE_ELEMENTS, TILE_OF_GPU = 2**22, 2**27
# On a CPU, bf16 products have a multiple of this many rows.
LOW_ROWS = 64
# Rows of which column_best first takes the common maximum.
ROW_GROUP = 16


@cache
def has_fast_product() -> bool:
    """Return whether this CPU has bf16 instructions; without, a bf16 product is not faster."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def score_dtype(z: Tensor, prototypes: Tensor) -> torch.dtype:
    """Return the dtype of the product that selects candidates: the fastest on the device."""
    if z.dtype == torch.float64:
        return z.dtype
    if z.is_cuda:
        return torch.float16
    large = len(z) >= 256 and z.shape[1] >= 64 and len(prototypes) >= 1024
    return torch.bfloat16 if large and has_fast_product() else torch.float32


def tile_rows(z: Tensor, count: int) -> int:
    """Return the number of states per tile of scores against ``count`` prototypes."""
    if torch.compiler.is_exporting():
        return len(z)
    return max(1, at_once(z, TILE_ELEMENTS, TILE_OF_GPU) // count // ROW_GROUP) * ROW_GROUP


def product(states: Float[Tensor, "N d"], bank: Float[Tensor, "K d"]) -> Float[Tensor, "N K"]:
    """Return the scores of states against prototypes, both in the dtype for selection.

    On a CPU a bf16 product is compiled for each number of rows and cached, a megabyte each, so the
    number is rounded up to a multiple of ``LOW_ROWS``.
    """
    padding = -len(states) % LOW_ROWS if states.dtype == torch.bfloat16 else 0
    return (F.pad(states, (0, 0, 0, padding)) @ bank.T)[: len(states)]


def largest(
    scores: Float[Tensor, "R K"], count: int, *, ordered: bool = True
) -> tuple[Float[Tensor, "R m"], Int64[Tensor, "R m"]]:
    """Return the ``count`` largest values of every row, descending, and their columns.

    Columns j, j + G, j + 2G … form group j. The m largest values are in the m groups with the
    largest maxima, so two short top-k's replace one over the whole row.
    """
    rows, width = scores.shape
    size = 1  # of a group; minimises width/size + count·size, the columns compared
    while width // (2 * size) >= count and width / (2 * size) > size * count:
        size *= 2
    if size == 1:
        values, columns = scores.topk(count, dim=1, sorted=ordered)
        return values, columns
    groups = width // size
    grouped = scores[:, : size * groups].reshape(rows, size, groups)
    leading = grouped.amax(1).topk(count, dim=1, sorted=False).indices
    steps = torch.arange(0, size * groups, groups, device=scores.device)
    columns = (leading[:, :, None] + steps).flatten(1)
    if size * groups < width:
        tail = torch.arange(size * groups, width, device=scores.device)
        columns = torch.cat([columns, tail.expand(rows, -1)], dim=1)
    values, indices = scores.gather(1, columns).topk(count, dim=1, sorted=ordered)
    return values, columns.gather(1, indices)


def column_best(scores: Float[Tensor, "R K"]) -> tuple[Float[Tensor, " K"], Int64[Tensor, " K"]]:
    """Return the largest score of every column and its row."""
    if scores.device.type != "cpu" or len(scores) < ROW_GROUP:
        best, row = scores.max(0)
        return best, row
    # argmax over columns is slow on a CPU: take maxima of groups first; the last may overlap.
    rows, width = scores.shape
    complete = rows // ROW_GROUP * ROW_GROUP
    maxima = scores[:complete].view(-1, ROW_GROUP, width).amax(1)
    if complete < rows:
        maxima = torch.cat([maxima, scores[-ROW_GROUP:].amax(0, keepdim=True)])
    best, group = maxima.max(0)
    first = (group * ROW_GROUP).clamp_max(rows - ROW_GROUP)
    members = first + torch.arange(ROW_GROUP)[:, None]
    return best, first + scores.gather(0, members).argmax(0)


def pair_products(
    starts: Int64[Tensor, " s"],
    columns: Int64[Tensor, " e"],
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"],
) -> Float[Tensor, " e"]:
    """Return left_n · right_m for the listed pairs, without the full matrix or copies of rows.

    No sum depends on the other pairs.

    Args:
        starts: row n of ``left`` has the pairs from starts[n] to starts[n + 1]; s = n + 1.
        columns: the row of ``right`` in each pair, without duplicates. Neither is validated.
        left, right: float32 or float64 vectors.
    """
    sparse: Any = torch.sparse
    zeros, shape = left.new_zeros(len(columns)), (len(left), len(right))
    pattern = torch.sparse_csr_tensor(  # pyright: ignore[reportUnknownMemberType]
        starts, columns, zeros, shape, check_invariants=False
    )
    products: Tensor = sparse.sampled_addmm(pattern, left, right.T, beta=0.0).values()
    return products


def cosines_of(
    unit_z: Tensor, unit_p: Tensor, indices: Int64[Tensor, "N m"]
) -> Float[Tensor, "N m"]:
    """Return the products of each row of ``unit_z`` with m rows of ``unit_p``."""
    n, m = indices.shape
    if unit_z.device.type == "cpu" and not torch.compiler.is_compiling():
        starts = torch.arange(0, n * m + 1, m)
        return pair_products(starts, indices.flatten(), unit_z, unit_p).view(n, m)
    step = at_once(unit_z, TILE_ELEMENTS, TILE_OF_GPU) // (m * unit_z.shape[1]) + 1
    parts = zip(torch.split(unit_z, step), torch.split(indices, step), strict=True)
    return torch.cat([(unit_p[chosen] @ z[:, :, None]).squeeze(2) for z, chosen in parts])


def ranked(
    unit_z: Tensor, unit_p: Tensor, candidates: Int64[Tensor, "N m"], k: int
) -> tuple[Int64[Tensor, "N k"], Float[Tensor, "N k"]]:
    """Return the k candidates of each state with the largest cosines, and these cosines."""
    cosines, order = cosines_of(unit_z, unit_p, candidates).topk(k, dim=1)
    return candidates.gather(1, order), cosines


def _search(
    unit_z: Float[Tensor, "N d"],
    unit_p: Float[Tensor, "K d"],
    k: int,
    mask: Bool[Tensor, " N"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return indices and cosines [N, k], and each prototype's nearest state and cosine [K]."""
    low = score_dtype(unit_z, unit_p)
    low_z, low_p = unit_z.to(low), unit_p.to(low)
    candidates = min(len(unit_p), k + SPARE if low.itemsize == 2 else k)
    step = tile_rows(unit_z, len(unit_p))
    columns: list[Tensor] = []
    best: list[Tensor] = []
    states: list[Tensor] = []
    for start in range(0, len(unit_z), step):
        tile = slice(start, start + step)
        scores = product(low_z[tile], low_p)
        columns.append(largest(scores, candidates, ordered=False)[1])
        if mask is not None:
            scores.add_(~mask[tile, None], alpha=MASKED_SCORE)
        value, row = column_best(scores)
        best.append(value)
        states.append(row + start)
    point = states[0]
    if len(states) > 1:
        point = torch.stack(states).gather(0, torch.stack(best).argmax(0, keepdim=True))[0]
    chosen = ranked(unit_z, unit_p, torch.cat(columns), k)
    return *chosen, point, cosines_of(unit_p, unit_z, point[:, None])[:, 0]


def route(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
    mask: Bool[Tensor, " N"] | None = None,
) -> Routing:
    """Route every state to its k nearest prototypes (PRISM, "Positive similarity scoring").

    c_ni = cos(z_n, p_i), α_ni = ReLU(scale · c_ni) for the k largest c_ni, in descending order. A
    low-precision product may select them; cosines, activations and gradients are float32 (float64
    for float64 input) and exist for the N·k + K selected pairs only. No shape depends on values,
    and nothing synchronises with the device.

    Args:
        z: hidden states.
        prototypes: the bank P, any norms; a zero row has cosine 0 to everything.
        k: prototypes per token.
        scale: τ > 0.
        mask: False excludes a state from ``nearest_point``.
    """
    check_axes(z=("N d", z), prototypes=("K d", prototypes), mask=("N", mask))
    check_whole("the number of prototypes of a state", k, 1, len(prototypes))
    unit_z, unit_p = (unit_rows(at_least_float32(x)) for x in (z, prototypes))
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        results = _search(unit_z, unit_p, k, mask)
    cosines, point_cosine = cast(
        "tuple[Tensor, Tensor]",
        _ChosenCosines.apply(unit_z, unit_p, *results),  # pyright: ignore[reportUnknownMemberType]
    )
    indices, _, point, _ = results
    if mask is not None:
        exists = mask.any()
        point, point_cosine = torch.where(exists, point, -1), torch.where(exists, point_cosine, -1)
    activations = torch.relu(scale * cosines)
    return Routing(indices, cosines, activations, cosines[:, 0], point, point_cosine)


def reconstruct(routing: Routing, prototypes: Float[Tensor, "K d"]) -> Float[Tensor, "N d"]:
    """Return ẑ_n = Σ_i α_ni p_i without gathering [N, k, d] rows."""
    weights = routing.activations
    return gather_sum(routing.indices, weights, prototypes.to(weights.dtype))


def gather_sum(
    indices: Int64[Tensor, "N k"], weights: Float[Tensor, "N k"], rows: Float[Tensor, "K d"]
) -> Float[Tensor, "N d"]:
    """Return Σ_j weights_nj rows[indices_nj]."""
    return F.embedding_bag(indices, rows, per_sample_weights=weights.contiguous(), mode="sum")


def scatter_sum(
    target: Int64[Tensor, " e"],
    source: Int64[Tensor, " e"],
    weights: Float[Tensor, " e"],
    rows: Float[Tensor, "N d"],
    count: int,
) -> Float[Tensor, "K d"]:
    """Return Σ weights_e rows[source_e] over the pairs with target_e = i, for every i < count."""
    target, order = target.sort()
    offsets = torch.searchsorted(target, torch.arange(count, device=target.device))
    source, weights = source[order], weights[order]
    return F.embedding_bag(source, rows, offsets, per_sample_weights=weights, mode="sum")


def states_of(indices: Int64[Tensor, "N k"]) -> Int64[Tensor, " e"]:
    """Return the state of each pair in indices.flatten()."""
    return torch.arange(len(indices), device=indices.device).repeat_interleave(indices.shape[1])


class _ChosenCosines(torch.autograd.Function):
    """Return the given cosines, with gradients for their pairs only."""

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
        grad_cosines, grad_points = grads
        grad_z = None
        if ctx.needs_input_grad[0]:
            grad_z = gather_sum(indices, grad_cosines, unit_p)
            grad_z.index_add_(0, point, unit_p * grad_points[:, None])
        target = torch.cat([indices.flatten(), torch.arange(len(unit_p), device=indices.device)])
        source = torch.cat([states_of(indices), point])
        weights = torch.cat([grad_cosines.flatten(), grad_points])
        grad_p = scatter_sum(target, source, weights, unit_z, len(unit_p))
        return grad_z, grad_p, None, None, None, None


@torch.no_grad()
def nearest(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
) -> Nearest:
    """Return the part of :func:`route` that concerns states, from a float32 product.

    It avoids a normalised copy of the prototypes, which for one state takes as long as its scores.
    """
    z, prototypes = at_least_float32(z), at_least_float32(prototypes)
    lengths = inverse_norms(prototypes).T
    with torch.autocast(z.device.type, enabled=False):
        parts = [
            largest(scores_of(states * inverse_norms(states), prototypes).mul_(lengths), k)
            for states in torch.split(z, tile_rows(z, len(prototypes)))
        ]
    cosines, indices = (torch.cat(column) for column in zip(*parts, strict=True))
    return Nearest(indices, cosines, torch.relu(scale * cosines))


def scores_of(
    states: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"]
) -> Float[Tensor, "N K"]:
    """Return Z Pᵀ, for few states as (P Zᵀ)ᵀ, which is up to three times as fast."""
    if len(states) <= FEW_STATES:
        return (prototypes @ states.T).T.contiguous()
    return states @ prototypes.T
