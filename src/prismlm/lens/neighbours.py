"""Positions of chosen cells with a chosen next token, and how near their states are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from prismlm.lens.cells import Cells

# Of one cell and next token, at most so many positions are compared: in stretches of so many, since
# each stretch is one place of the disk, and these evenly over the range.
MOST_OF_A_RANGE = 512
STRETCH = 32
RECORDS_AT_ONCE = 2**15


class Neighbours(NamedTuple):
    """Positions found, in the order of what was asked, [u] each.

    Attributes:
        pair: the pair of cell and token, or the range, that each belongs to.
        row: its row in the cells.
        place: the global position of its state.
        read: the token there, the last that its state has read.
        cosine: of that state to the one asked for, float32.
        stands_for: how many positions of its range it stands for, float64; 1 if all are there.
        probability: what the model gave to the token that came next there, float16.
    """

    pair: np.ndarray
    row: np.ndarray
    place: np.ndarray
    read: np.ndarray
    cosine: np.ndarray
    stands_for: np.ndarray
    probability: np.ndarray


def neighbours(
    cells: Cells, query: np.ndarray, cell: np.ndarray, token: np.ndarray, states: Tensor
) -> Neighbours:
    """Return the positions in the cells that are asked for, with the next tokens asked for.

    Of a range with more than 512 positions, 16 stretches of 32, evenly spaced, stand for all.

    Args:
        cells: of the lens.
        query: the state that each pair of cell and token is asked for, int64 [p], ascending.
        cell, token: the pairs, int64 [p].
        states: unit vectors, float32 [Q, d].
    """
    return compared(cells, query, *cells.ranges(cell, token), states, MOST_OF_A_RANGE)


def compared(
    cells: Cells, query: np.ndarray, first: np.ndarray, last: np.ndarray, states: Tensor, most: int
) -> Neighbours:
    """Return the positions of ranges of rows, from ``first`` up to, without, ``last``, int64 [p].

    Of a range of more than ``most``, stretches of 32, evenly spaced, stand for all.
    """
    sizes = last - first
    kept = np.minimum(sizes, most)
    pair, offset = each_of(kept)
    step = sizes / np.maximum(kept, 1)
    stretch, within = np.divmod(offset, STRETCH)
    rows = first[pair] + (stretch * (STRETCH * step[pair])).astype(np.int64) + within
    place, read = np.empty((2, len(rows)), dtype=np.int64)
    cosine = np.empty(len(rows), dtype=np.float32)
    probability = np.empty(len(rows), dtype=np.float16)
    owner = query[pair]
    for begin in range(0, len(rows), RECORDS_AT_ONCE):
        some = slice(begin, begin + RECORDS_AT_ONCE)
        records = cells.records(rows[some])
        place[some], read[some] = records["position"], records["read"]
        probability[some] = records["probability"]
        cosine[some] = cells.codes.cosines(records, states, owner[some])
    return Neighbours(pair, rows, place, read, cosine, step[pair], probability)


def each_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the members of groups of these sizes: the group of each, and its number in that."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def nearest_of(values: np.ndarray, owner: np.ndarray, count: int) -> np.ndarray:
    """Return the largest value of each owner, −1 where it has none: float32 [count]."""
    found = np.full(count, -1, dtype=np.float32)
    np.maximum.at(found, owner, values)
    return found


def largest(values: np.ndarray, limit: int) -> np.ndarray:
    """Return where the largest values stand, at most so many: descending, ties by their place."""
    candidates = np.arange(len(values))
    if 0 < limit < len(values):
        # Sorting all of them would take a good part of an answer's time.
        candidates = np.flatnonzero(values >= np.partition(values, -limit)[-limit])
    return candidates[np.argsort(-values[candidates], kind="stable")][: max(0, limit)]
