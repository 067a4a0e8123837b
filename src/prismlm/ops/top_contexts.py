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
    reaches = candidates.cosine >= top.threshold[candidates.prototype]
    candidates = Contexts(*(column[reaches] for column in candidates))
    if not candidates.prototype.numel():
        return top
    present = torch.zeros(len(top.cosine), dtype=torch.bool)
    present[candidates.prototype] = True
    affected = present.nonzero().squeeze(1)
    row = (present.cumsum(0) - 1)[candidates.prototype]
    contexts = top.cosine.shape[1]
    held = TopContexts(*(column[affected] for column in top))
    filled = (held.position >= 0).flatten()
    held_row = torch.arange(len(affected)).repeat_interleave(contexts)[filled]
    rows = torch.cat([held_row, row])
    columns = [
        torch.cat([old.flatten(0, 1)[filled], new])
        for old, new in zip(held, candidates[1:], strict=True)
    ]
    cosine, position, document = columns[0], columns[1], columns[2]

    by_rank = position.argsort(stable=True)
    by_rank = by_rank[(-cosine)[by_rank].argsort(stable=True)]
    row_and_document = rows * (document.max() + 1) + document
    by_document = by_rank[row_and_document[by_rank].argsort(stable=True)]
    in_runs = row_and_document[by_document]
    first_of_run = torch.ones(len(rows), dtype=torch.bool)
    first_of_run[1:] = in_runs[1:] != in_runs[:-1]
    best_of_document = torch.zeros(len(rows), dtype=torch.bool)
    best_of_document[by_document[first_of_run]] = True
    ranked = by_rank[best_of_document[by_rank]]
    ranked = ranked[rows[ranked].argsort(stable=True)]
    ranked_rows = rows[ranked]
    starts = torch.searchsorted(ranked_rows, torch.arange(len(affected)))
    rank = torch.arange(len(ranked)) - starts[ranked_rows]
    kept = rank < contexts
    target_row, target_rank, source = affected[ranked_rows[kept]], rank[kept], ranked[kept]
    for store, column in zip(top, columns, strict=True):
        store[target_row, target_rank] = column[source]
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
