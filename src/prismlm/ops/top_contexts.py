"""The L best contexts of every prototype, as a value that can be merged in any order.

Contexts rank by cosine descending, then by position ascending: a total order. A document appears
once per prototype, with its best position. Keeping the L best documents of a stream is the same as
merging the L best of its parts, whatever the parts and their order, so shards give the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Bool, Float32, Int64
from torch import Tensor

from prismlm.errors import InputError


class Contexts(NamedTuple):
    """Candidate contexts, one a row: M of them in any order."""

    prototype: Int64[Tensor, " M"]
    cosine: Float32[Tensor, " M"]
    position: Int64[Tensor, " M"]
    document: Int64[Tensor, " M"]
    activation: Float32[Tensor, " M"]
    routed: Bool[Tensor, " M"]
    state: BFloat16[Tensor, "M d"]


class TopContexts(NamedTuple):
    """The best contexts so far, K × L, each row best first; position −1 marks an empty place."""

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
    """Return an accumulator of ``contexts`` places for each of ``prototypes`` rows.

    Raises:
        InputError: no places are asked for.
    """
    if contexts < 1:
        raise InputError(f"contexts kept per prototype must be at least 1, got {contexts}.")
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
    """Return ``top`` with the candidates let in. The argument's storage is reused.

    Raises:
        InputError: a cosine is NaN, which has no rank.
    """
    if torch.isnan(candidates.cosine).any():
        raise InputError("a hidden state is not finite: the model's weights hold NaN or infinity.")
    entering = (candidates.cosine >= top.threshold[candidates.prototype]).nonzero().squeeze(1)
    if not len(entering):
        return top
    prototype = candidates.prototype[entering]
    prototypes, contexts = top.cosine.shape
    present = torch.zeros(prototypes, dtype=torch.bool)
    present[prototype] = True
    filled = (present[:, None] & (top.position >= 0)).flatten().nonzero().squeeze(1)
    rows = torch.cat([filled // contexts, prototype])
    cosine, position, document = (
        torch.cat([held.flatten()[filled], new[entering]])
        for held, new in zip(top[:3], candidates[1:4], strict=True)
    )

    # Best first: by cosine, then by position; of each document the best alone; then by row.
    order = position.argsort(stable=True)
    order = order[(-cosine)[order].argsort(stable=True)]
    alike = (rows * (document.max() + 1) + document)[order]
    by_document = alike.argsort(stable=True)
    first = alike[by_document].diff(prepend=alike.new_full((1,), -1)) != 0
    order = order[by_document[first].sort().values]
    order = order[rows[order].argsort(stable=True)]
    rows = rows[order]
    rank = torch.arange(len(rows)) - torch.searchsorted(rows, rows)
    kept = rank < contexts
    source, target = order[kept], (rows * contexts + rank)[kept]
    old = source < len(filled)
    # What has its place already stays: states are by far the most of what there is to move.
    source_old, target_old = filled[source[old]], target[old]
    moves = source_old != target_old
    source_old, target_old = source_old[moves], target_old[moves]
    source_new, target_new = entering[source[~old] - len(filled)], target[~old]
    for store, column in zip(top, candidates[1:], strict=True):
        flat = store.flatten(0, 1)
        flat[target_old] = flat.index_select(0, source_old)
        flat[target_new] = column.index_select(0, source_new)
    return top


def merge(left: TopContexts, right: TopContexts) -> TopContexts:
    """Return the best contexts of both, in new storage; associative and commutative.

    Raises:
        InputError: the two differ in prototypes, places or width.
    """
    if left.state.shape != right.state.shape:
        raise InputError(
            f"cannot merge accumulators of {list(left.state.shape)} and "
            f"{list(right.state.shape)} [prototypes, contexts, width]: index every shard with the "
            "same head and the same number of contexts."
        )
    return update(TopContexts(*(column.clone() for column in left)), finish(right))


def finish(top: TopContexts) -> Contexts:
    """Return the kept contexts as rows, by prototype and then best first."""
    filled = top.position >= 0
    prototype = filled.nonzero()[:, 0]
    return Contexts(prototype, *(column[filled] for column in top))
