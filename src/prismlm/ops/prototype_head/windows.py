"""Routing the positions of windows, and which of them each window enters for a prototype."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.prototype_head import screened, tiled
from prismlm.ops.prototype_head.exact import (
    ABSENT,
    FEW_SPARE,
    ROW_GROUP,
    SPARE,
    entries_at_least,
    full_precision,
    largest,
    rank_rows,
)
from prismlm.ops.prototype_head.routing import check_arguments, inverse_norms, score_dtype

# Pairs of a row and a prototype whose cosines are summed together.
MOST_PAIRS = 2**17


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


class _RowScan(NamedTuple):
    """Routing of all rows, and row, prototype and cosine of candidates."""

    indices: Tensor
    cosines: Tensor
    row: Tensor
    prototype: Tensor
    cosine: Tensor


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
    tiles of rows share may give one for each; the better of them is what one tile would give. The
    threshold leaves candidates out and changes no bit of the others, nor of the routing.

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
    rows, kept = _whole_groups(owned)
    if threshold is None:
        threshold = z.new_full((len(prototypes),), ABSENT, dtype=score_dtype(z.dtype))
    flat, length = z.flatten(0, 1), z.shape[1]
    window = rows // length
    with full_precision(z.device):
        found = None
        if len(rows) and screened.supports(flat, prototypes, k):
            found = _scan_screened(flat[rows], prototypes, k, window, threshold)
        if found is None:
            found = _scan_tiles(flat, rows, prototypes, k, window, threshold)
    place = rows[found.row]
    return WindowScan(
        found.indices[kept],
        found.cosines[kept],
        place // length,
        place % length,
        found.prototype,
        found.cosine,
    )


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


def _scan_tiles(
    flat: Tensor, rows: Tensor, prototypes: Tensor, k: int, window: Tensor, threshold: Tensor
) -> _RowScan:
    dtype = score_dtype(flat.dtype)
    prototypes = prototypes.to(dtype)
    unit_p = prototypes * inverse_norms(prototypes)
    count = len(prototypes)
    spread, step = min(k + SPARE, count), _tile_rows(count, flat)
    buffer = prototypes.new_empty(min(step, len(rows)), count)
    none = prototypes.new_empty(0)
    empty = rows.new_empty(0)
    parts = [_RowScan(rows.new_empty(0, k), none.new_empty(0, k), empty, empty, none)]
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        states = flat[rows[part]].to(dtype)
        scores = torch.mm(states * inverse_norms(states), unit_p.T, out=buffer[: len(states)])
        cosines, indices = rank_rows(*largest(scores, spread), states, prototypes, k)
        row, prototype, cosine = _best_of_windows(scores, window[part], threshold)
        parts.append(_RowScan(indices, cosines, row + start, prototype, cosine))
    return _RowScan(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _tile_rows(count: int, like: Tensor) -> int:
    """Return how many rows of ``count`` scores a tile has, a multiple of the group of rows."""
    elements = tiled.tile_elements(like)
    return max(ROW_GROUP, elements // count // ROW_GROUP * ROW_GROUP)


def _group_windows(window: Tensor) -> tuple[Tensor, list[int]]:
    """Return the number of each group's window, counted from 0, and where the others begin."""
    changes = window[::ROW_GROUP].diff().ne(0)
    local = torch.cat([changes.new_zeros(1), changes]).cumsum(0)
    starts = (changes.nonzero().squeeze(1) + 1).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return local, cast("list[int]", starts)


def _best_of_windows(
    scores: Tensor, window: Tensor, threshold: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, prototype and score of each window's best, where they reach the threshold."""
    count = scores.shape[1]
    maxima = scores.view(-1, ROW_GROUP, count).amax(1)
    local, starts = _group_windows(window)
    best = torch.stack([part.amax(0) for part in torch.tensor_split(maxima, starts)])
    wanted = torch.where(best >= threshold, best, torch.inf)
    group, prototype = (maxima >= wanted[local]).nonzero(as_tuple=True)
    rows = group[:, None] * ROW_GROUP + torch.arange(ROW_GROUP, device=scores.device)
    entered = scores[rows, prototype[:, None]] == maxima[group, prototype, None]
    row = group * ROW_GROUP + entered.to(torch.uint8).argmax(1)
    chosen = _first_of_windows(local, row, prototype, best.numel(), count)
    row, prototype = row[chosen], prototype[chosen]
    return row, prototype, scores[row, prototype]


def _first_of_windows(
    local: Tensor, row: Tensor, prototype: Tensor, places: int, count: int
) -> Tensor:
    """Say which entries are the first of their window and prototype, where several tie."""
    place = local[row // ROW_GROUP] * count + prototype
    first = row.new_full((places,), len(local) * ROW_GROUP)
    return row == first.scatter_reduce_(0, place, row, "amin")[place]


def _scan_screened(
    states: Tensor, prototypes: Tensor, k: int, window: Tensor, threshold: Tensor
) -> _RowScan | None:
    """Do what :func:`_scan_tiles` does from a bf16 product, or nothing where that does not pay.

    Whether it pays depends on the states alone: else their cosines, rounded another way, would
    depend on the threshold.
    """
    pair = screened.vectors_of(states, prototypes)
    if pair is None:
        return None
    vectors, bank = pair
    best = _BestOfWindows(vectors, bank, window, threshold)
    elements = tiled.tile_elements(states)
    found = screened.screen(vectors, bank, k, elements, best.take)
    if found is None:
        return None
    spread = min(k + FEW_SPARE, len(prototypes))
    values, indices = screened.largest_listed(found, vectors, bank, spread, elements)
    cosines, indices = rank_rows(values, indices, vectors.full, bank.full, k)
    best.settle()
    row, prototype, cosine = (torch.cat(part) for part in zip(*best.parts, strict=True))
    return _RowScan(indices, cosines, row, prototype, cosine)


class _BestOfWindows:
    """Finds row, prototype and cosine of each window's best, where they reach the threshold."""

    def __init__(
        self, states: screened.Vectors, bank: screened.Vectors, window: Tensor, threshold: Tensor
    ) -> None:
        self.states, self.bank, self.threshold = states, bank, threshold
        self.local, starts = _group_windows(window)
        self.starts = starts
        self.error = screened.error_of(states, bank)
        self.lowest = screened.reduced(threshold, self.error)
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.waiting = 0
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def take(self, tile: screened.Scores) -> bool:
        """Note the pairs that may be the best of their window, as far as the tile shows it."""
        count = len(self.threshold)
        maxima = tile.scores[:, :count].view(-1, ROW_GROUP, count).amax(1)
        first, end = tile.start // ROW_GROUP, tile.start // ROW_GROUP + len(maxima)
        local = self.local[first:end] - self.local[first]
        inside = [place - first for place in self.starts if first < place < end]
        best = torch.stack([part.amax(0) for part in torch.tensor_split(maxima, inside)])
        columns = (best.amax(0) >= self.lowest).nonzero().squeeze(1)
        best = best.index_select(1, columns)
        lowest = torch.maximum(screened.reduced(best, 2 * self.error), self.lowest[columns])
        row, place = entries_at_least(tile.scores, maxima, columns, lowest.index_select(0, local))
        self.pairs.append((row + tile.start, columns[place]))
        self.waiting += len(row)
        if self.waiting > MOST_PAIRS:
            self.settle()
        return True

    def settle(self) -> None:
        """Sum the pairs that wait, if any do, and keep each window's best."""
        if not self.pairs:
            return
        row, prototype = (torch.cat(part) for part in zip(*self.pairs, strict=True))
        self.pairs, self.waiting = [], 0
        # Stable, so that the order of a row's pairs does not depend on those left out.
        row, order = torch.sort(row, stable=True)
        prototype = prototype[order]
        cosine = screened.cosines_of(row, prototype, self.states, self.bank)
        count, windows = len(self.threshold), len(self.starts) + 1
        place = self.local[row // ROW_GROUP] * count + prototype
        top = cosine.new_full((windows * count,), ABSENT)
        top.scatter_reduce_(0, place, cosine, "amax")
        chosen = (cosine == top[place]) & (cosine >= self.threshold[prototype])
        row, prototype, cosine = row[chosen], prototype[chosen], cosine[chosen]
        chosen = _first_of_windows(self.local, row, prototype, windows * count, count)
        self.parts.append((row[chosen], prototype[chosen], cosine[chosen]))
