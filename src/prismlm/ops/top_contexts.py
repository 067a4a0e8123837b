"""The L nearest contexts of each prototype, updated while a corpus is scanned.

A context is a position of the corpus. Contexts are ordered by descending
cosine, then by position, and each document appears once per prototype, with its best position. The
order is total, so that merging the contexts of shards in any order gives those of one scan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor


class Contexts(NamedTuple):
    """Contexts as M rows; after ``prototype``, the columns are those of :class:`TopContexts`.

    ``position`` is one of the corpus, ``document`` the number of its document; ``routed`` says
    whether the head chose the prototype there. A cosine is not NaN.
    """

    prototype: Int64[Tensor, " M"]
    cosine: Float32[Tensor, " M"]
    position: Int64[Tensor, " M"]
    document: Int64[Tensor, " M"]
    activation: Float32[Tensor, " M"]
    routed: Bool[Tensor, " M"]


class TopContexts(NamedTuple):
    """The best contexts so far, one row per prototype, best first; empty slots have position −1."""

    cosine: Float32[Tensor, "K L"]
    position: Int64[Tensor, "K L"]
    document: Int64[Tensor, "K L"]
    activation: Float32[Tensor, "K L"]
    routed: Bool[Tensor, "K L"]

    @property
    def threshold(self) -> Float32[Tensor, " K"]:
        """The cosine that a candidate must reach to enter each row; −∞ with empty slots."""
        return self.cosine[:, -1]


def empty(prototypes: int, contexts: int) -> TopContexts:
    """Return ``contexts`` empty slots for each of ``prototypes``."""
    shape = (prototypes, contexts)
    return TopContexts(
        torch.full(shape, -torch.inf),
        torch.full(shape, -1, dtype=torch.int64),
        torch.full(shape, -1, dtype=torch.int64),
        torch.zeros(shape),
        torch.zeros(shape, dtype=torch.bool),
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
    columns = [
        torch.cat([old.flatten()[occupied], new[entering]])
        for old, new in zip(top, candidates[1:], strict=True)
    ]
    cosine, position, document = columns[:3]
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
    # A row never gets fewer contexts, so no slot is left over.
    for store, column in zip(top, columns, strict=True):
        store.view(-1)[slot] = column[source]
    return top


def merge(top: TopContexts, other: TopContexts) -> TopContexts:
    """Insert the contexts of ``other``, for the same prototypes, into ``top``, and return it."""
    return update(top, to_rows(other))


def to_rows(top: TopContexts) -> Contexts:
    """Return the contexts as rows, by prototype and then best first."""
    filled = top.position >= 0
    prototype = filled.nonzero()[:, 0]
    return Contexts(prototype, *(column[filled] for column in top))
