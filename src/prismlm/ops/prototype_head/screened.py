"""Routing bf16 states on a CPU: candidates from a bf16 product, their cosines from float32 sums.

A CPU with bf16 dot products forms z·Pᵀ twice as fast in bf16 as in float32. It sums in float32, but
hands every score out rounded to bf16: within 2⁻⁸ |c| of it. That is enough to leave out all but
k and some ten prototypes of a state and one or two states of a prototype. Those pairs are summed
again in float32; a state whose k-th cosine may not be clear of all left out gets a full product.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.ops.prototype_head.exact import ABSENT, Candidates, exact_pairs, margin
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.ops.prototype_head.selection import column_maxima, entries_at_least, largest

# u / (1 − 2u), rounded up, for the unit roundoff u = 2⁻⁸ of bf16.
ROUNDING = 1.01 * 2.0**-8
# Raw products of vectors with norms from here to its inverse are far from the ends of float32.
SMALLEST_NORM = 2.0**-30
# A state's threshold is this many places beyond its k-th: mostly further off than the rounding.
PLACES = 6
# Columns that are compared by their common maximum before they are compared one by one.
GROUP = 8
# Entries per one wanted in a tile beyond which near-ties are too many for screening to pay,
CROWDED = 4
# and the share of states that may need all their scores in float32.
DOUBTFUL = 0.25


class Vectors(NamedTuple):
    """States or prototypes as the product and the sums take them."""

    low: Tensor
    full: Tensor
    inverse: Tensor


class Screened(NamedTuple):
    """What a pass over bf16 scores leaves over.

    Attributes:
        doubtful: states whose k nearest rounding may hide; none of their pairs are listed.
        leaders: states (ascending) and prototypes of the pairs that may be among a state's k best.
        points: likewise, those that may be a prototype's best.
    """

    doubtful: Bool[Tensor, " N"]
    leaders: tuple[Int64[Tensor, " e"], Int64[Tensor, " e"]]
    points: tuple[Int64[Tensor, " c"], Int64[Tensor, " c"]]


@cache
def has_fast_product() -> bool:
    """Whether this CPU multiplies bf16 numbers itself; elsewhere a bf16 product is no faster."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@cache
def _announce_sparse_tensors() -> None:
    """Make the first CSR tensor of the process, which warns that such tensors are new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.zeros(1, 1).to_sparse_csr()


def supports(z: Tensor, prototypes: Tensor, k: int) -> bool:
    """Whether :func:`scan` takes these and is likely to be quicker than a float32 product."""
    n, width = z.shape
    return (
        z.device.type == "cpu"
        and z.dtype == prototypes.dtype == torch.bfloat16
        and n >= 256
        and width >= 64
        and len(prototypes) >= max(1024, 32 * (k + PLACES))
        and torch.backends.mkldnn.enabled
        and has_fast_product()
    )


def scan(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    spread: int,
    mask: Bool[Tensor, " N"] | None,
    elements: int,
) -> Candidates | None:
    """Return what :func:`tiled.scan_tiles` would, or None where screening would not pay.

    Args:
        z: bf16 states.
        prototypes: the bf16 bank.
        k: how many prototypes a state keeps.
        spread: how many candidates to return for each, more than k.
        mask: False leaves a state out of ``best`` and ``state``.
        elements: scores held at a time.
    """
    states, bank = _vectors(z), _vectors(prototypes)
    if not (_in_range(states) and _in_range(bank)):
        return None
    found = _screen(states, bank, k, mask, elements)
    if found is None:
        return None
    _announce_sparse_tensors()
    values, indices = _ranked(*found.leaders, states, bank, spread)
    unit_p = bank.full * bank.inverse[:, None]
    rows = found.doubtful.nonzero().squeeze(1)
    for part in torch.split(rows, max(16, elements // len(bank.full))):
        product = (states.full[part] * states.inverse[part, None]) @ unit_p.T
        values[part], indices[part] = largest(product, spread)
    best, state = _nearest(*found.points, states, bank)
    return Candidates(values, indices, best, state, torch.zeros_like(state, dtype=torch.bool))


def _screen(
    states: Vectors, bank: Vectors, k: int, mask: Tensor | None, elements: int
) -> Screened | None:
    """Pass over the bf16 scores, a tile of rows at a time; None where near-ties are too many."""
    n, count = len(states.low), len(bank.low)
    error = margin(states.low.shape[1], torch.float32)
    rows = max(1, min(max(16, elements // count), n))
    low = states.low.new_empty(rows, count)
    # Whole groups of columns: those beyond the bank score below all others.
    whole = GROUP * _group_count(k + PLACES)
    width = -(-count // whole) * whole
    buffer = states.full.new_full((rows, width), ABSENT)
    best = states.full.new_full((width,), ABSENT)
    doubtful: list[Tensor] = []
    leaders: list[tuple[Tensor, Tensor]] = []
    points: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, n, rows):
        tile = slice(start, min(start + rows, n))
        scores = buffer[: tile.stop - start]
        torch.mm(states.low[tile], bank.low.T, out=low[: len(scores)])
        scores[:, :count].copy_(low[: len(scores)])
        scores[:, :count].mul_(bank.inverse).mul_(states.inverse[tile, None])
        unclear, threshold, maxima = _thresholds(scores, k, error)
        doubtful.append(unclear)
        row, column = _leaders(scores, maxima, threshold)
        leaders.append((row + start, column))
        if mask is not None:
            scores.index_fill_(0, (~mask[tile]).nonzero().squeeze(1), ABSENT)
        maxima, tile_best = column_maxima(scores)
        best = torch.maximum(best, tile_best)
        lowest = _reduced(best, 2 * error)
        columns = ((tile_best >= lowest) & (tile_best > ABSENT)).nonzero().squeeze(1)
        point, place = entries_at_least(scores, maxima, columns, lowest[columns])
        points.append((point + start, columns[place], scores[point, columns[place]]))
        too_many = len(row) > CROWDED * (k + PLACES) * len(scores) or len(point) > CROWDED * count
        if too_many or unclear.sum() > DOUBTFUL * len(scores):
            return None
    point, column, score = (torch.cat(part) for part in zip(*points, strict=True))
    kept = score >= _reduced(best, 2 * error)[column]
    row, prototype = (torch.cat(part) for part in zip(*leaders, strict=True))
    return Screened(torch.cat(doubtful), (row, prototype), (point[kept], column[kept]))


def _vectors(low: Tensor) -> Vectors:
    low = low.contiguous()
    full = low.float()
    return Vectors(low, full, inverse_norms(full).squeeze(1))


def _in_range(vectors: Vectors) -> bool:
    """Whether products of these neither overflow nor lose digits; those of zero rows do not."""
    inverse = vectors.inverse
    inside = (inverse >= SMALLEST_NORM) & (inverse <= 1 / SMALLEST_NORM)
    zero = inverse == 0
    return bool((inside | zero).all()) and not bool(vectors.full[zero].any())


def _group_count(places: int) -> int:
    """Return a power of two so far above ``places`` that few of the leaders share a group."""
    return max(64, 1 << (2 * places - 1).bit_length())


def _reduced(scores: Tensor, error: float) -> Tensor:
    """Return what the screened score of a better cosine than those of ``scores`` must reach."""
    return scores - 2 * ROUNDING * scores.abs() - error


def _thresholds(scores: Tensor, k: int, error: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return which rows are in doubt, a threshold for every row, and the maxima of GROUP columns.

    The threshold is place k + PLACES among the maxima of larger groups of columns: that many
    entries reach it at least. A row where rounding may hide one of the k best below it is in
    doubt, and nothing reaches its threshold.
    """
    rows, places = len(scores), k + PLACES
    maxima = scores.view(rows, GROUP, -1).amax(1)
    larger = maxima.view(rows, -1, _group_count(places)).amax(1)
    top = larger.topk(places, dim=1, sorted=False).values
    threshold = top.amin(1)
    clear = threshold + 2 * ROUNDING * threshold.abs() + 3 * error
    doubtful = (top > clear[:, None]).sum(1) < k
    return doubtful, threshold.masked_fill(doubtful, torch.inf), maxima


def _leaders(scores: Tensor, maxima: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of all entries that reach their row's threshold, row after row."""
    width = scores.shape[1]
    # Eight flags at a time, as listing them is the slow part; index_select is the quick gather.
    words = (maxima >= threshold[:, None]).view(torch.int64)
    row, word = words.nonzero(as_tuple=True)
    flags = words.view(-1).index_select(0, row * words.shape[1] + word).view(torch.bool)
    entry, flag = flags.view(-1, 8).nonzero(as_tuple=True)
    row, group = row.index_select(0, entry), word.index_select(0, entry) * 8 + flag
    place = (row * width + group)[:, None] + torch.arange(0, width, width // GROUP)
    members = scores.view(-1).index_select(0, place.view(-1)).view_as(place)
    entry, member = (members >= threshold.index_select(0, row)[:, None]).nonzero(as_tuple=True)
    return row.index_select(0, entry), group.index_select(0, entry) + member * (width // GROUP)


def _cosines(starts: Tensor, row: Tensor, column: Tensor, of: Vectors, to: Vectors) -> Tensor:
    """Return the float32 cosine of every pair; row i has those from starts[i] to starts[i + 1]."""
    sparse: Any = torch.sparse
    size = len(of.full), len(to.full)
    pattern = torch.sparse_csr_tensor(  # pyright: ignore[reportUnknownMemberType]
        starts, column, torch.zeros(len(column)), size, check_invariants=False
    )
    sums: Tensor = sparse.sampled_addmm(pattern, of.full, to.full.T, beta=0.0).values()
    return sums * of.inverse.index_select(0, row) * to.inverse.index_select(0, column)


def _starts(row: Tensor, n: int) -> Tensor:
    starts = row.new_zeros(n + 1)
    torch.cumsum(torch.bincount(row, minlength=n), 0, out=starts[1:])
    return starts


def _ranked(
    row: Tensor, column: Tensor, states: Vectors, bank: Vectors, spread: int
) -> tuple[Tensor, Tensor]:
    """Return the largest cosines of every state, ABSENT beyond the listed, and their prototypes."""
    n = len(states.full)
    starts = _starts(row, n)
    cosines = _cosines(starts, row, column, states, bank)
    slots = max(spread, int(starts.diff().max()))
    values = cosines.new_full((n, slots), ABSENT)
    indices = column.new_zeros(n, slots)
    place = torch.arange(len(row)) + (torch.arange(n) * slots - starts[:-1]).index_select(0, row)
    values.view(-1)[place], indices.view(-1)[place] = cosines, column
    values, order = values.topk(spread, dim=1)
    return values, indices.gather(1, order)


def _nearest(row: Tensor, column: Tensor, states: Vectors, bank: Vectors) -> tuple[Tensor, Tensor]:
    """Return the best cosine and state of every prototype, ties to the lower state."""
    row, order = row.sort()
    column = column[order]
    n, count = len(states.full), len(bank.full)
    cosines = _cosines(_starts(row, n), row, column, states, bank)
    none = cosines.new_full((count,), ABSENT)
    best = none.scatter_reduce(0, column, cosines, "amax")
    near = cosines >= best[column] - margin(states.full.shape[1], cosines.dtype)
    tied = near & (torch.bincount(column[near], minlength=count) > 1)[column]
    at = tied.nonzero().squeeze(1)
    if len(at):
        cosines[at] = exact_pairs(states.full, bank.full, row[at], column[at])
        best = none.scatter_reduce(0, column, cosines, "amax")
    first = torch.full_like(column, n).where(cosines < best[column], row)
    state = column.new_full((count,), n).scatter_reduce_(0, column, first, "amin")
    return best, state.masked_fill_(best == ABSENT, -1)
