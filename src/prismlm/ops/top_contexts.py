"""The L nearest contexts of every prototype, kept while a corpus is scanned.

A context is a position of the corpus with its hidden state. Contexts rank by cosine descending,
then by position ascending: a total order. A document appears once per prototype, with its best
position. Keeping the L best documents of a stream is the same as merging the L best of its parts,
whatever the parts and their order, so shards give the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Bool, Float32, Int64
from torch import Tensor


class Contexts(NamedTuple):
    """Contexts as M rows; after ``prototype`` its columns are those of :class:`TopContexts`.

    Attributes:
        prototype: that the context is near to.
        cosine: of state and prototype; never NaN, which has no rank.
        position: in the corpus.
        document: that holds the position.
        activation: of the prototype there.
        routed: whether the prototype was among those that the head chose there.
        state: scaled to length 1.
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
        """The cosine a candidate must reach to enter each row (−∞ while there is room)."""
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
    """Add the candidates that are good enough to ``top``, in place, and return it."""
    entering = (candidates.cosine >= top.threshold[candidates.prototype]).nonzero().squeeze(1)
    if not len(entering):
        return top
    prototypes, contexts = top.cosine.shape
    changing = torch.zeros(prototypes, dtype=torch.bool)
    changing[candidates.prototype[entering]] = True
    # Slots are numbered across rows. Rank the occupied ones of changing rows with the newcomers.
    occupied = (changing[:, None] & (top.position >= 0)).flatten().nonzero().squeeze(1)
    row = torch.cat([occupied // contexts, candidates.prototype[entering]])
    cosine, position, document = (
        torch.cat([old.flatten()[occupied], new[entering]])
        for old, new in zip(top[:3], candidates[1:4], strict=True)
    )
    order = position.argsort(stable=True)
    for key in (-cosine, row):
        order = order[key[order].argsort(stable=True)]

    # Only the best of each document in a row stays.
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
    # Most old contexts stay in their slots, and states are large: copy only what moves.
    moves = old_from != old_to
    old_from, old_to = old_from[moves], old_to[moves]
    new_from, new_to = entering[source[~is_old] - len(occupied)], slot[~is_old]
    for store, column in zip(top, candidates[1:], strict=True):
        flat = store.flatten(0, 1)
        flat[old_to] = flat.index_select(0, old_from)
        flat[new_to] = column.index_select(0, new_from)
    return top


def merge(top: TopContexts, other: TopContexts) -> TopContexts:
    """Add the contexts of ``other`` to ``top``, in place, and return it; any order gives the same.

    Both have the same prototypes; ``top`` keeps its number of contexts.
    """
    return update(top, to_rows(other))


def to_rows(top: TopContexts) -> Contexts:
    """Return the contexts as rows, by prototype and then best first."""
    filled = top.position >= 0
    prototype = filled.nonzero()[:, 0]
    return Contexts(prototype, *(column[filled] for column in top))
