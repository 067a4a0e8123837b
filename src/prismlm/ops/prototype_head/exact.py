"""The largest scores, and which of two cosines is larger where rounding does not tell.

A product of unit vectors in float32 is within (d + 8) u of the true cosine, u = 2⁻²⁴ (float64:
2⁻⁵³). Where two scores are closer than twice that, their cosines are computed again in float64 and
rounded to the dtype that scores are ranked in; equal ones go to the lower index.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import BFloat16, Bool, Float, Int64
from torch import Tensor

from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.ops.tiles import at_once

# Candidates kept beyond k, so that near-ties at the edge can be ranked again without a full row.
SPARE = 8
# Where few states are read at a time: more near-ties than these are rare, and cost one full row.
FEW_SPARE = 3
FEW_STATES = 8
# Rows of a bf16 product come in multiples of this.
LOW_ROWS = 64
# float64 values computed at a time: 4 MiB.
CHUNK_ELEMENTS = 2**19
# The score of a state that a mask leaves out: below every cosine.
ABSENT = -2.0
# Rows that are compared by their common maximum before they are compared one by one.
ROW_GROUP = 16


class Candidates(NamedTuple):
    """What a pass over all scores keeps, exact up to :func:`margin`; no ties are settled.

    Attributes:
        values: the m = min(k + SPARE, K) largest scores of every state, descending.
        indices: their prototypes.
        best: the largest score of every prototype among unmasked states; ABSENT without any.
        state: a state that has it; −1 without any.
        contested: whether another state comes within the margin of it.
    """

    values: Float[Tensor, "N m"]
    indices: Int64[Tensor, "N m"]
    best: Float[Tensor, " K"]
    state: Int64[Tensor, " K"]
    contested: Bool[Tensor, " K"]


class Search(NamedTuple):
    """The exact k nearest prototypes of every state and nearest state of every prototype."""

    indices: Int64[Tensor, "N k"]
    cosines: Float[Tensor, "N k"]
    nearest_point: Int64[Tensor, " K"]
    nearest_point_cosine: Float[Tensor, " K"]


def margin(width: int, dtype: torch.dtype) -> float:
    """Return the distance from which on the order of two scores is the order of the cosines."""
    return (width + 8) * torch.finfo(dtype).eps


@contextmanager
def full_precision(device: torch.device) -> Generator[None]:
    """Keep autocast, TF32 and bf16 products out: :func:`margin` counts on float32's rounding."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        backend.matmul.fp32_precision = before


def settle(
    found: Candidates,
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    mask: Bool[Tensor, " N"] | None,
) -> Search:
    """Rank near-ties among the candidates exactly; z and prototypes are not normalised."""
    cosines, indices = rank_rows(found.values, found.indices, z, prototypes, k)
    best, state = found.best, found.state
    columns = (found.contested & (best > ABSENT)).nonzero().squeeze(1)
    if columns.numel():
        lowest = best[columns] - 2 * margin(z.shape[1], z.dtype)
        exact, first = rank_columns(columns, lowest, z, prototypes, mask)
        best, state = best.index_put((columns,), exact), state.index_put((columns,), first)
    return Search(indices, cosines, state, best.clamp_min(-1.0))


def rank_rows(
    values: Float[Tensor, "N m"],
    candidates: Int64[Tensor, "N m"],
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
) -> tuple[Float[Tensor, "N k"], Int64[Tensor, "N k"]]:
    """Return the k best cosines and prototypes of every state, ties to the lower index.

    Args:
        values: as in :class:`Candidates`.
        candidates: its ``indices``.
        z: the states, not normalised.
        prototypes: likewise.
        k: how many to keep.
    """
    n, spread = values.shape
    count, width = prototypes.shape
    bound = margin(width, values.dtype)
    near = values[:, :-1] - values[:, 1:] <= bound
    doubtful = torch.zeros(n, spread, dtype=torch.bool, device=values.device)
    doubtful[:, :-1] |= near
    doubtful[:, 1:] |= near
    # Beyond k only what might still belong among the first k matters.
    doubtful[:, k:] = values[:, k - 1 : k] - values[:, k:] <= bound
    top, indices = values[:, :k].clone(), candidates[:, :k].clone()
    # Where even the last spare is too close to the k-th, any prototype might belong.
    unbounded = doubtful[:, -1] & (k < spread < count)
    doubtful &= ~unbounded[:, None]
    rows = doubtful.any(1).nonzero().squeeze(1)
    if rows.numel():
        row, slot = doubtful.nonzero(as_tuple=True)
        refined = values.index_put(
            (row, slot), exact_pairs(z, prototypes, row, candidates[row, slot])
        )
        # Columns ascend, so a stable sort leaves ties with the lower index first.
        columns, ascending = candidates[rows].sort(dim=1)
        ranked, order = refined[rows].gather(1, ascending).sort(dim=1, descending=True, stable=True)
        top[rows], indices[rows] = ranked[:, :k], columns.gather(1, order)[:, :k]
    rows = unbounded.nonzero().squeeze(1)
    if rows.numel():
        unit_p = _unit(prototypes)
        for part in torch.split(rows, max(1, at_once(z, CHUNK_ELEMENTS) // count)):
            cosines = _cosines(_unit(z[part]), unit_p, z.dtype)
            ranked, order = cosines.sort(dim=1, descending=True, stable=True)
            top[part], indices[part] = ranked[:, :k], order[:, :k]
    return top, indices


def rank_columns(
    columns: Int64[Tensor, " c"],
    lowest: Float[Tensor, " c"],
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    mask: Bool[Tensor, " N"] | None,
) -> tuple[Float[Tensor, " c"], Int64[Tensor, " c"]]:
    """Return the best cosine and state of every listed prototype, ties to the lower state.

    Args:
        columns: prototypes that have more than one state near their best.
        lowest: for each of them a score that its best state is known to reach, less the margin.
        z: the states, not normalised.
        prototypes: the bank.
        mask: False leaves a state out.
    """
    chosen = prototypes[columns]
    unit_p = chosen * inverse_norms(chosen)
    unit_p64 = _unit(chosen)
    best = torch.full_like(lowest, ABSENT)
    state = torch.full_like(columns, -1)
    step = max(1, at_once(z, CHUNK_ELEMENTS) // max(len(columns), z.shape[1]))
    for part in torch.split(torch.arange(len(z), device=z.device), step):
        # Another shape of product may round otherwise, by as much again.
        reaches = (z[part] * inverse_norms(z[part])) @ unit_p.T >= lowest
        rows = part[reaches.any(1) if mask is None else reaches.any(1) & mask[part]]
        if rows.numel():
            value, place = _cosines(_unit(z[rows]), unit_p64, z.dtype).max(0)
            state = torch.where(value > best, rows[place], state)
            best = torch.maximum(value, best)
    return best, state


def _unit(vectors: Tensor) -> Tensor:
    vectors = vectors.double()
    return vectors * inverse_norms(vectors)


def _cosines(unit_z: Tensor, unit_p: Tensor, dtype: torch.dtype) -> Tensor:
    # Rounded to float32, a float64 product ties where it should; in float64 it may not.
    if dtype == torch.float32:
        return (unit_z @ unit_p.T).to(dtype)
    return torch.stack([(row * unit_p).sum(-1) for row in unit_z])


def exact_pairs(z: Tensor, prototypes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the cosine of z[rows[e]] and prototypes[columns[e]] for every e, ranked exactly."""
    # Vectors are read and written five times: an eighth of a chunk stays in a core's own cache.
    step = max(1, at_once(z, CHUNK_ELEMENTS // 8) // z.shape[1])
    parts = [
        (_unit(z[row]) * _unit(prototypes[column])).sum(-1)
        for row, column in zip(torch.split(rows, step), torch.split(columns, step), strict=True)
    ]
    return torch.cat(parts).to(z.dtype)


def products(
    states: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"]
) -> Float[Tensor, "N K"]:
    """Return Z Pᵀ; a product of few rows with many columns takes up to three times as long."""
    few = len(states) <= FEW_STATES
    return (prototypes @ states.T).T.contiguous() if few else states @ prototypes.T


def whole_rows(low: BFloat16[Tensor, "R d"]) -> BFloat16[Tensor, "S d"]:
    """Return rows filled up with zeros to a multiple of ``LOW_ROWS``.

    A bf16 product on a CPU is compiled for its number of rows, and the code of a thousand such
    products is kept: a megabyte for each number.
    """
    missing = -len(low) % LOW_ROWS
    return torch.cat([low, low.new_zeros(missing, low.shape[1])]) if missing else low


def largest(
    scores: Float[Tensor, "R K"], count: int
) -> tuple[Float[Tensor, "R m"], Int64[Tensor, "R m"]]:
    """Return the ``count`` largest values of every row, descending, and their columns.

    Columns j, j + G, j + 2G … form group j. The m largest values lie in the m groups with the
    largest maxima, so that two short top-k's find what one over the whole row would. Equal values
    come in no particular order.
    """
    rows, width = scores.shape
    size = _group_size(width, count)
    if size == 1:
        values, columns = scores.topk(count, dim=1)
        return values, columns
    groups = width // size
    grouped = scores[:, : size * groups].reshape(rows, size, groups)
    leading = grouped.amax(1).topk(count, dim=1, sorted=False).indices
    steps = torch.arange(0, size * groups, groups, device=scores.device)
    columns = (leading[:, :, None] + steps).flatten(1)
    if size * groups < width:
        tail = torch.arange(size * groups, width, device=scores.device)
        columns = torch.cat([columns, tail.expand(rows, -1)], dim=1)
    values, place = scores.gather(1, columns).topk(count, dim=1)
    return values, columns.gather(1, place)


def _group_size(width: int, count: int) -> int:
    """Return the power of two g that makes width/g + count·g, the columns looked at, smallest."""
    size = 1
    while width // (2 * size) >= count and width / (2 * size) + 2 * size * count < (
        width / size + size * count
    ):
        size *= 2
    return size


def column_maxima(scores: Float[Tensor, "R K"]) -> tuple[Float[Tensor, "G K"], Float[Tensor, " K"]]:
    """Return the maxima of every column over G groups of neighbouring rows, and over all rows."""
    size = ROW_GROUP
    while scores.shape[0] % size:
        size //= 2
    maxima = scores.reshape(-1, size, scores.shape[1]).amax(1)
    return maxima, maxima.amax(0)


def entries_at_least(
    scores: Float[Tensor, "R K"],
    maxima: Float[Tensor, "G _"],
    columns: Int64[Tensor, " c"],
    threshold: Float[Tensor, " c"] | Float[Tensor, "G c"],
) -> tuple[Int64[Tensor, " e"], Int64[Tensor, " e"]]:
    """Return the rows of the entries that reach their column's threshold, and which column.

    The second result counts among ``columns``. ``maxima`` are those of as many rows each, as
    :func:`column_maxima` has them: only groups of rows whose maximum reaches the threshold, which
    may be one of their own, are looked into. Comparing and listing is over ten times faster on a
    CPU than a maximum with indices down columns.
    """
    size = scores.shape[0] // maxima.shape[0]
    group, place = (maxima.index_select(1, columns) >= threshold).nonzero(as_tuple=True)
    rows = group[:, None] * size + torch.arange(size, device=scores.device)
    entries = rows * scores.shape[1] + columns[place, None]
    # Over one dimension, index_select gathers three times as fast as indexing does.
    values = scores.flatten().index_select(0, entries.flatten()).view_as(entries)
    least = threshold[place] if threshold.ndim == 1 else threshold[group, place]
    entry, step = (values >= least[:, None]).nonzero(as_tuple=True)
    return group[entry] * size + step, place[entry]
