"""How near the corpus comes to text of its own that it does not hold: the scale of support.

For a prediction of y at a state z, the nearest position is the one with the largest cosine among
those of the active cells whose next token is y. For positions of the corpus itself, with their own
documents left out, that is what text of the same kind finds which the corpus does not have. The
percentile of a prediction among them is its score; that of an answer is the mean over its tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prismlm.index.cells import Cells
from prismlm.index.neighbours import nearest_of, neighbours
from prismlm.layers import PrototypeHead

DOCUMENTS, RUN = 160, 32
LENGTHS = (1, 2, 4, 8, 16, 32)
# An answer is strong above what 95 % of unseen text of its length has, and none below 95 %.
SHARE_CALLED = 0.05
PERCENTILES = 101
ROWS_AT_ONCE = 2**20


@dataclass(frozen=True)
class SupportScale:
    """What unseen text of the corpus scores.

    Attributes:
        nearest: percentiles 0 to 100 of the nearest cosine of single predictions.
        lengths: of answers, in tokens.
        low, high: for each length, the scores that 5 % of answers lie below, and above.
        predictions: how many it was measured on.
    """

    nearest: list[float]
    lengths: list[int]
    low: list[float]
    high: list[float]
    predictions: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they stand in ``meta.json``."""
        return asdict(self)

    def score(self, nearest: np.ndarray) -> np.ndarray:
        """Return the share of unseen predictions with a smaller nearest cosine, in [0, 1]."""
        place = np.searchsorted(np.array(self.nearest), nearest, side="right")
        return np.clip((place - 0.5) / len(self.nearest), 0, 1)

    def bounds(self, length: int) -> tuple[float, float]:
        """Return low and high for an answer of so many tokens, between those that were measured."""
        at = np.log(self.lengths)
        where = np.log(max(1, length))
        return float(np.interp(where, at, self.low)), float(np.interp(where, at, self.high))


def measure_support(
    cells: Cells, head: PrototypeHead, weight: Tensor, seed: int = 0
) -> SupportScale | None:
    """Measure the scale on runs of 32 positions of 160 documents, each document left out in turn.

    Args:
        cells: of the lens.
        head: its prototype head.
        weight: of the output embedding, [V, d].
        seed: of the choice of documents and positions.

    Returns:
        The scale, or None where the cells hold too little to measure it.
    """
    rows = _runs(cells, np.random.default_rng(seed))
    if len(rows) < RUN:
        return None
    nearest = leave_one_out(cells, head, weight, rows)
    grid = np.quantile(nearest, np.linspace(0, 1, PERCENTILES)).tolist()
    scale = SupportScale(grid, [], [], [], len(rows))
    scores = scale.score(nearest)
    number = cells.document_of(cells.records(rows)["position"])
    lengths: list[int] = []
    low: list[float] = []
    high: list[float] = []
    for length in LENGTHS:
        means = _means(scores, number, length)
        if len(means) < 20:
            break
        lengths.append(length)
        low.append(float(np.quantile(means, SHARE_CALLED)))
        high.append(float(np.quantile(means, 1 - SHARE_CALLED)))
    return SupportScale(grid, lengths, low, high, len(rows)) if lengths else None


def _runs(cells: Cells, generator: np.random.Generator) -> np.ndarray:
    """Return the rows of runs of positions, one run a document, by position."""
    lengths = cells.documents["length"].to_numpy() - 1
    usable = np.flatnonzero(lengths > 0)
    if not len(usable) or not len(cells):
        return np.empty(0, dtype=np.int64)
    chosen = np.sort(generator.choice(usable, min(DOCUMENTS, len(usable)), replace=False))
    start = cells.starts[chosen] + (
        generator.random(len(chosen)) * np.maximum(1, lengths[chosen] - RUN)
    ).astype(np.int64)
    wanted = (start[:, None] + np.arange(RUN))[np.arange(RUN) < lengths[chosen, None]]
    rows, places = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for first in range(0, len(cells), ROWS_AT_ONCE):
        position = cells.positions(first, ROWS_AT_ONCE)
        found = np.flatnonzero(np.isin(position, wanted))
        rows.append(found + first)
        places.append(position[found])
    return np.concatenate(rows)[np.argsort(np.concatenate(places), kind="stable")]


def leave_one_out(
    cells: Cells, head: PrototypeHead, weight: Tensor, rows: np.ndarray
) -> np.ndarray:
    """Return the nearest cosine of positions among those of all other documents: float32 [n]."""
    records = cells.records(rows)
    states = torch.nn.functional.normalize(cells.states(records), dim=-1)
    tokens = cells.tokens(rows)
    query, cell = active_cells(head, weight, states, tokens)
    found = neighbours(cells, query, cell, tokens[query], states)
    owner = query[found.pair]
    own = cells.document_of(records["position"])
    others = cells.document_of(found.place) != own[owner]
    return nearest_of(found.cosine[others], owner[others], len(rows))


@torch.no_grad()
def active_cells(
    head: PrototypeHead, weight: Tensor, states: Tensor, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the prototypes in use at each state that speak for a token: (state, prototype)."""
    found = head.nearest(states.to(head.prototypes.device))
    signature = (weight[torch.from_numpy(tokens)].float() - weight.float().mean(0)).to(
        head.prototypes.device
    )
    speaks = torch.einsum("nkd,nd->nk", head.prototypes.float()[found.indices], signature)
    query, slot = ((found.activations > 0) & (speaks > 0)).nonzero(as_tuple=True)
    return query.cpu().numpy(), found.indices[query, slot].cpu().numpy()


def _means(scores: np.ndarray, document: np.ndarray, length: int) -> np.ndarray:
    """Return the mean scores of successive runs of one length within each document."""
    means: list[float] = []
    for number in np.unique(document).tolist():
        own = scores[document == number]
        whole = len(own) // length * length
        means += own[:whole].reshape(-1, length).mean(1).tolist()
    return np.array(means)
