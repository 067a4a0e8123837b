"""Routing on a CPU that multiplies bf16 itself: candidates from a bf16 product, exact float32 sums.

Such a CPU forms z·Pᵀ twice as fast in bf16 as in float32. It sums in float32, but hands every score
out rounded to bf16: within 2⁻⁸ |c| of the product of its factors. Where z or P are float32, unit
vectors are rounded to bf16 first, and the norms of what that took off, some 2⁻⁹, bound the rest:

    |cos(z, p) − score| ≤ 2⁻⁸ |score| + ‖z − ẑ‖ + ‖ẑ‖ ‖p − p̂‖ + rounding of the sums

That is enough to leave out all but k and some few prototypes of a state and some few states of a
prototype. Those pairs alone are summed in float32, each as if there were no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.ops.pair_products import pair_products
from prismlm.ops.prototype_head.exact import (
    ABSENT,
    LOW_ROWS,
    SPARE,
    Candidates,
    column_maxima,
    entries_at_least,
    exact_pairs,
    largest,
    margin,
    whole_rows,
)
from prismlm.ops.prototype_head.routing import inverse_norms, norm

# u / (1 − 2u), rounded up, for the unit roundoff u = 2⁻⁸ of bf16.
ROUNDING = 1.01 * 2.0**-8
# Raw products of vectors with norms from here to its inverse are far from the ends of float32.
SMALLEST_NORM = 2.0**-30
# Columns that are compared by their common maximum before they are compared one by one.
GROUP = 8
# Entries per one wanted beyond which near-ties are too many: in a tile, for screening to pay; in a
# row, which gets a full product then.
CROWDED = 4
# The share of such rows in a tile beyond which screening does not pay.
DOUBTFUL = 0.25


class Vectors(NamedTuple):
    """States or prototypes as the product and the sums take them.

    Attributes:
        low: bf16 rows that are multiplied.
        factor: what a product with one has to be multiplied with; None where rows are unit vectors.
        full: float32 rows.
        inverse: 1/‖row‖ of these, 0 for a zero row.
        lost: at least ‖row/‖row‖ − low·factor‖ of every row.
    """

    low: Tensor
    factor: Tensor | None
    full: Tensor
    inverse: Tensor
    lost: float


class Scores(NamedTuple):
    """The screened scores of a tile of states.

    Attributes:
        start: its first state.
        scores: for K prototypes and ABSENT for columns that fill up a whole group.
        maxima: those of groups of GROUP columns, whole/GROUP apart.
    """

    start: int
    scores: Tensor
    maxima: Tensor


class Listed(NamedTuple):
    """Pairs that may be among a state's k best.

    Attributes:
        doubtful: states with too many of them; none of theirs is listed.
        row: their states, ascending.
        column: their prototypes.
    """

    doubtful: Bool[Tensor, " N"]
    row: Int64[Tensor, " e"]
    column: Int64[Tensor, " e"]


@cache
def has_fast_product() -> bool:
    """Whether this CPU multiplies bf16 numbers itself; elsewhere a bf16 product is no faster."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def supports(z: Tensor, prototypes: Tensor, k: int) -> bool:
    """Whether :func:`scan` takes these and is likely to be quicker than a float32 product."""
    n, width = z.shape
    return (
        z.device.type == "cpu"
        and {z.dtype, prototypes.dtype} <= {torch.bfloat16, torch.float32}
        and n >= 256
        and width >= 64
        and len(prototypes) >= max(1024, 32 * (k + SPARE))
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
        z: bf16 or float32 states.
        prototypes: the bank, likewise.
        k: how many prototypes a state keeps.
        spread: how many candidates to return for each, more than k.
        mask: False leaves a state out of ``best`` and ``state``.
        elements: scores held at a time.
    """
    pair = vectors_of(z, prototypes)
    if pair is None:
        return None
    states, bank = pair
    nearest = _NearestStates(error_of(states, bank), len(bank.full), mask)
    found = screen(states, bank, k, elements, nearest.take)
    if found is None:
        return None
    values, indices = largest_listed(found, states, bank, spread, elements)
    best, state = nearest.settle(states, bank)
    return Candidates(values, indices, best, state, torch.zeros_like(state, dtype=torch.bool))


def vectors_of(z: Tensor, prototypes: Tensor) -> tuple[Vectors, Vectors] | None:
    """Return both as they are multiplied, or None where products overflow or lose digits."""
    states, bank = vectors(z), vectors(prototypes)
    return (states, bank) if in_range(states) and in_range(bank) else None


def vectors(given: Tensor) -> Vectors:
    """Return vectors as they are multiplied."""
    given = given.contiguous()
    full = given.float()
    inverse = inverse_norms(full)
    if given.dtype == torch.bfloat16:
        return Vectors(given, inverse.squeeze(1), full, inverse.squeeze(1), 0.0)
    unit = full * inverse
    low = unit.bfloat16()
    return Vectors(low, None, full, inverse.squeeze(1), float(norm(unit.sub_(low)).max()))


def in_range(vectors: Vectors) -> bool:
    """Whether products of these neither overflow nor lose digits; those of zero rows do not."""
    inverse = vectors.inverse
    inside = (inverse >= SMALLEST_NORM) & (inverse <= 1 / SMALLEST_NORM)
    zero = inverse == 0
    return bool((inside | zero).all()) and not bool(vectors.full[zero].any())


def error_of(states: Vectors, bank: Vectors) -> float:
    """Return how far a score may be from the cosine, beside its own rounding to bf16."""
    rounding = margin(states.low.shape[1], torch.float32)
    return rounding + states.lost + (1 + states.lost) * bank.lost


def reduced(scores: Tensor, error: float) -> Tensor:
    """Return what the score of a better cosine than that of ``scores`` must reach.

    Args:
        scores: of a pair, or cosines.
        error: how far both may be off together, beside their rounding to bf16.
    """
    return scores - 2 * ROUNDING * scores.abs() - error


def screen(
    states: Vectors, bank: Vectors, k: int, elements: int, watch: Callable[[Scores], bool]
) -> Listed | None:
    """List pairs that may be among a state's k best; None where near-ties are too many.

    ``watch`` looks at every tile as well and says whether screening still pays. The pairs do not
    depend on it, nor on the other states of a tile.
    """
    lead = 2 * error_of(states, bank) + margin(states.low.shape[1], torch.float32)
    wanted = CROWDED * (k + SPARE)
    doubtful: list[Tensor] = []
    listed: list[tuple[Tensor, Tensor]] = []
    for tile in _tiles(states, bank, k, elements):
        # k groups have maxima of at least this, so a state's k best cosines belong to scores of
        # at least that less the errors; what is as near as the margin is ranked with them.
        larger = tile.maxima.view(len(tile.scores), -1, _group_count(k)).amax(1)
        lowest = larger.topk(k, dim=1, sorted=False).values.amin(1)
        row, column = _leaders(tile, reduced(lowest, lead))
        count = torch.bincount(row, minlength=len(tile.scores))
        unclear = count > wanted
        if len(row) > wanted * len(count) or int(unclear.sum()) > DOUBTFUL * len(count):
            return None
        doubtful.append(unclear)
        if unclear.any():
            clear = ~unclear[row]
            row, column = row[clear], column[clear]
        listed.append((row + tile.start, column))
        if not watch(tile):
            return None
    row, column = (torch.cat(part) for part in zip(*listed, strict=True))
    return Listed(torch.cat(doubtful), row, column)


def _tiles(states: Vectors, bank: Vectors, k: int, elements: int) -> Iterator[Scores]:
    n, count = len(states.low), len(bank.low)
    rows = max(1, min(max(16, elements // count // 16 * 16), n))
    low = states.low.new_empty(-(-rows // LOW_ROWS) * LOW_ROWS, count)
    # Whole groups of columns: those beyond the bank score below all others.
    columns = GROUP * _group_count(k)
    buffer = states.full.new_empty(rows, -(-count // columns) * columns)
    buffer[:, count:] = ABSENT
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        scores = buffer[: part.stop - start]
        present = scores[:, :count]
        whole = whole_rows(states.low[part])
        torch.mm(whole, bank.low.T, out=low[: len(whole)])
        present.copy_(low[: len(scores)])
        if bank.factor is not None:
            present.mul_(bank.factor)
        if states.factor is not None:
            present.mul_(states.factor[part, None])
        yield Scores(start, scores, scores.view(len(scores), GROUP, -1).amax(1))


def _group_count(places: int) -> int:
    """Return a power of two so far above ``places`` that few of the leaders share a group."""
    return max(64, 1 << (2 * places - 1).bit_length())


def _leaders(tile: Scores, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of all entries that reach their row's threshold, row after row."""
    scores, width = tile.scores, tile.scores.shape[1]
    # Eight flags at a time, as listing them is the slow part; index_select is the quick gather.
    words = (tile.maxima >= threshold[:, None]).view(torch.int64)
    row, word = words.nonzero(as_tuple=True)
    flags = words.view(-1).index_select(0, row * words.shape[1] + word).view(torch.bool)
    entry, flag = flags.view(-1, 8).nonzero(as_tuple=True)
    row, group = row.index_select(0, entry), word.index_select(0, entry) * 8 + flag
    place = (row * width + group)[:, None] + torch.arange(0, width, width // GROUP)
    members = scores.view(-1).index_select(0, place.view(-1)).view_as(place)
    entry, member = (members >= threshold.index_select(0, row)[:, None]).nonzero(as_tuple=True)
    return row.index_select(0, entry), group.index_select(0, entry) + member * (width // GROUP)


def cosines_of(row: Tensor, column: Tensor, states: Vectors, bank: Vectors) -> Tensor:
    """Return the float32 cosine of every pair, rows ascending; others do not change its bits."""
    return _cosines(_starts(row, len(states.full)), row, column, states, bank)


def _cosines(starts: Tensor, row: Tensor, column: Tensor, of: Vectors, to: Vectors) -> Tensor:
    sums = pair_products(starts, column, of.full, to.full)
    return sums * of.inverse.index_select(0, row) * to.inverse.index_select(0, column)


def _starts(row: Tensor, n: int) -> Tensor:
    starts = row.new_zeros(n + 1)
    torch.cumsum(torch.bincount(row, minlength=n), 0, out=starts[1:])
    return starts


def largest_listed(
    found: Listed, states: Vectors, bank: Vectors, spread: int, elements: int
) -> tuple[Tensor, Tensor]:
    """Return the largest cosines of every state, ABSENT beyond the listed, and their prototypes."""
    n, (doubtful, row, column) = len(states.full), found
    starts = _starts(row, n)
    cosines = _cosines(starts, row, column, states, bank)
    slots = max(spread, int(starts.diff().max()))
    values = cosines.new_full((n, slots), ABSENT)
    indices = column.new_zeros(n, slots)
    place = torch.arange(len(row)) + (torch.arange(n) * slots - starts[:-1]).index_select(0, row)
    values.view(-1).scatter_(0, place, cosines)
    indices.view(-1).scatter_(0, place, column)
    values, order = values.topk(spread, dim=1)
    indices = indices.gather(1, order)
    if doubtful.any():
        unit_p = bank.full * bank.inverse[:, None]
        rows = doubtful.nonzero().squeeze(1)
        for part in torch.split(rows, max(16, elements // len(bank.full))):
            product = (states.full[part] * states.inverse[part, None]) @ unit_p.T
            values[part], indices[part] = largest(product, spread)
    return values, indices


class _NearestStates:
    """Collects the pairs that may be a prototype's best."""

    def __init__(self, error: float, count: int, mask: Tensor | None) -> None:
        self.error, self.count, self.mask = error, count, mask
        self.best: Tensor | None = None
        self.points: list[tuple[Tensor, Tensor, Tensor]] = []

    def take(self, tile: Scores) -> bool:
        scores, start = tile.scores, tile.start
        if self.mask is not None:
            out = ~self.mask[start : start + len(scores)]
            scores.index_fill_(0, out.nonzero().squeeze(1), ABSENT)
        maxima, tile_best = column_maxima(scores)
        best = tile_best if self.best is None else torch.maximum(self.best, tile_best)
        lowest = reduced(best, 2 * self.error)
        columns = ((tile_best >= lowest) & (tile_best > ABSENT)).nonzero().squeeze(1)
        point, place = entries_at_least(scores, maxima, columns, lowest[columns])
        self.points.append((point + start, columns[place], scores[point, columns[place]]))
        self.best = best
        return len(point) <= CROWDED * self.count

    def settle(self, states: Vectors, bank: Vectors) -> tuple[Tensor, Tensor]:
        """Return the best cosine and state of every prototype, ties to the lower state."""
        assert self.best is not None
        row, column, score = (torch.cat(part) for part in zip(*self.points, strict=True))
        kept = score >= reduced(self.best, 2 * self.error)[column]
        row, order = torch.sort(row[kept])
        column = column[kept][order]
        n, count = len(states.full), len(bank.full)
        cosines = cosines_of(row, column, states, bank)
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
