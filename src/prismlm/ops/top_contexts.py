"""The L nearest contexts of each prototype, updated while a corpus is scanned.

A context is a position of the corpus with its hidden state. Contexts are ordered by descending
cosine, then by position, and each document appears once per prototype, with its best position. The
order is total, so that merging the contexts of shards in any order gives those of one scan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Bool, Float32, Int64
from torch import Tensor


class Contexts(NamedTuple):
    """Contexts as M rows; after ``prototype``, the columns are those of :class:`TopContexts`.

    Attributes:
        prototype: index of the prototype.
        cosine: of state and prototype; not NaN.
        position: in the corpus.
        document: index of the document with the position.
        activation: of the prototype at the position.
        routed: whether the head chose the prototype at the position.
        state: the hidden state, normalised.
    """

    prototype: Int64[Tensor, " M"]
    cosine: Float32[Tensor, " M"]
    position: Int64[Tensor, " M"]
    document: Int64[Tensor, " M"]
    activation: Float32[Tensor, " M"]
    routed: Bool[Tensor, " M"]
    state: BFloat16[Tensor, "M d"]


class TopContexts(NamedTuple):
    """The best contexts so far, one row per prototype, best first; empty slots have position −1."""

    cosine: Float32[Tensor, "K L"]
    position: Int64[Tensor, "K L"]
    document: Int64[Tensor, "K L"]
    activation: Float32[Tensor, "K L"]
    routed: Bool[Tensor, "K L"]
    state: BFloat16[Tensor, "K L d"]

    @property
    def threshold(self) -> Float32[Tensor, " K"]:
        """The cosine that a candidate must reach to enter each row; −∞ with empty slots."""
        return self.cosine[:, -1]


def empty(prototypes: int, contexts: int, width: int) -> TopContexts:
    """Return ``contexts`` empty slots for each of ``prototypes``, for states of ``width``."""
    shape = (prototypes, contexts)
    return TopContexts(
        torch.full(shape, -torch.inf),
        torch.full(shape, -1, dtype=torch.int64),
        torch.full(shape, -1, dtype=torch.int64),
        torch.zeros(shape),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(*shape, width, dtype=torch.bfloat16),
    )


def update(top: TopContexts, candidates: Contexts) -> TopContexts:
    """Insert those candidates into ``top`` that are good enough, in place, and return it."""
    entering = (candidates.cosine >= top.threshold[candidates.prototype]).nonzero().squeeze(1)
    if not len(entering):
        return top
    prototypes, contexts = top.cosine.shape
    changing = torch.zeros(prototypes, dtype=torch.bool)
    changing[candidates.prototype[entering]] = True
    # Sort the occupied slots (flattened indices) of changing rows together with the new contexts.
    occupied = (changing[:, None] & (top.position >= 0)).flatten().nonzero().squeeze(1)
    row = torch.cat([occupied // contexts, candidates.prototype[entering]])
    cosine, position, document = (
        torch.cat([old.flatten()[occupied], new[entering]])
        for old, new in zip(top[:3], candidates[1:4], strict=True)
    )
    order = position.argsort(stable=True)
    for key in (-cosine, row):
        order = order[key[order].argsort(stable=True)]

    # Only the best position of each document in a row remains.
    pair = (row * (document.max() + 1) + document)[order]
    by_pair = pair.argsort(stable=True)
    is_best = pair[by_pair].diff(prepend=pair.new_full((1,), -1)) != 0
    order = order[by_pair[is_best].sort().values]

    row = row[order]
    rank = torch.arange(len(row)) - torch.searchsorted(row, row)
    fits = rank < contexts
    source, slot = order[fits], (row * contexts + rank)[fits]
    is_old = source < len(occupied)
    old_from, old_to = occupied[source[is_old]], slot[is_old]
    # Most contexts stay in their slots, and states are large: copy only those that move.
    moves = old_from != old_to
    old_from, old_to = old_from[moves], old_to[moves]
    new_from, new_to = entering[source[~is_old] - len(occupied)], slot[~is_old]
    for store, column in zip(top, candidates[1:], strict=True):
        flat = store.flatten(0, 1)
        flat[old_to] = flat.index_select(0, old_from)
        flat[new_to] = column.index_select(0, new_from)
    return top


def merge(top: TopContexts, other: TopContexts) -> TopContexts:
    """Insert the contexts of ``other``, for the same prototypes, into ``top``, and return it."""
    return update(top, to_rows(other))


def to_rows(top: TopContexts) -> Contexts:
    """Return the contexts as rows, by prototype and then best first."""
    filled = top.position >= 0
    prototype = filled.nonzero()[:, 0]
    return Contexts(prototype, *(column[filled] for column in top))
