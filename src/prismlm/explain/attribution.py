"""From prototypes to training text: which sources and documents carry a prediction.

By ``evidence``, over the predictions asked about, e⁺ = max(e, 0):

    share(s) = Σ_n∈s a_n / Σ (Σ_i e⁺_i + e⁺_residual + e⁺_bias)

with a_n the evidence that falls on position n of the corpus (explain/positions.py). Documents,
sources, domains and licences are sums over the same positions. Unattributed is the share of
residual, bias and prototypes that no position which carries the prediction relies on.

By ``contexts`` the evidence of a prototype is spread over its
kept contexts c by e⁺_i exp(cos(state, c) / 0.02), whatever token they predicted; roll-ups by
source, domain and licence take each prototype's activation over the whole corpus.

By ``source``, the measure of PRISM, normalised to a sum of 1 over the positions:

    A_t = Σ_i α_ti μ_{S_i},   share(s) = Σ_t A_t(s) / Σ_t Σ_i α_ti

with S_i the kept contexts of prototype i and μ uniform over them, for every roll-up. It knows
neither the predicted token nor the residual, so only prototypes without contexts are unattributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.passages import (
    PositionAttribution,
    PositionSum,
    by_position,
    merge_positions,
)
from prismlm.explain.positions import DocumentsSoFar
from prismlm.explain.shares import (
    Attribution,
    DocumentShare,
    Grouped,
    Method,
    Sums,
    sums_by_key,
)
from prismlm.index.around import Around
from prismlm.index.lens import Lens
from prismlm.index.neighbours import each_of
from prismlm.index.where import Conditions, Where, normalised
from prismlm.ops.pair_products import pair_products

# The softmax temperature of cosines between hidden states: 0.02 of cosine is a factor of e.
CONTEXT_TEMPERATURE = 0.02
# How many float32 of hidden states are multiplied at once: 16 MB.
NUMBERS_AT_ONCE = 4_000_000


def attribute(
    table: EvidenceTable,
    lens: Lens,
    method: Method = "evidence",
    *,
    so_far: DocumentsSoFar | None = None,
) -> Attribution:
    """Gather what the predictions rely on.

    Args:
        table: their evidence.
        lens: the lens.
        method: ``evidence``, ``contexts`` or ``source``.
        so_far: of ``evidence``, what carried the predictions of the text before these, which are
            added to it; left out where the table knows its whole text.

    Raises:
        InputError: no such method, or the table lacks the activations it needs.
    """
    if method == "evidence":
        return by_position(table, lens, lens.cells, so_far)
    uses = table.uses(method)
    if method == "source":
        rows, beside = _uniform(uses.by_prototype, lens), 0.0
    else:
        rows = _by_similarity(uses.position, uses.prototype, uses.weight, table.states, lens)
        beside = table.residual_and_bias
    return ContextAttribution(lens, method, uses.by_prototype, rows, beside)


def merge_attributions(parts: list[Attribution]) -> Attribution:
    """Return the attribution of all positions of the parts, which are of one lens and method."""
    if isinstance(parts[0], PositionAttribution):
        return merge_positions(cast(list[PositionAttribution], parts))
    total = ContextSum(parts[0].lens, parts[0].method)
    for part in cast(list[ContextAttribution], parts):
        total.add(part)
    return total.result()


def sum_of(lens: Lens, method: Method) -> PositionSum | ContextSum:
    """Return what adds up the attributions of many texts in memory that the lens alone sets."""
    if method == "evidence":
        return PositionSum(lens, lens.cells)
    return ContextSum(lens, method)


@dataclass(frozen=True)
class ContextAttribution(Attribution):
    """What positions rely on, by kept contexts and by the mass of prototypes.

    Attributes:
        lens: the lens the numbers belong to.
        method: ``contexts`` or ``source``.
        prototypes: positive evidence, or α, of each prototype.
        contexts: how it spreads over rows of the index.
        beside: positive evidence of residual and bias.
    """

    lens: Lens
    method: Method
    prototypes: Sums
    contexts: Sums
    beside: float

    @property
    def total(self) -> float:
        """What shares are shares of."""
        return float(self.prototypes.values.sum()) + self.beside

    def grouped(self, by: str, conditions: Conditions) -> Grouped:
        """Return the amounts by the keys of a column, with a filter."""
        lens, (ids, values) = self.lens, self.prototypes
        if by == "document" or self.method == "source":
            table, first, rows = "index", lens.first_rows, self.contexts
        else:
            table, first = "mass", lens.first_masses
            row, owner = _rows_of(first[ids], first[ids + 1] - first[ids])
            rows = Sums(row, values[owner] * lens.mass_weights[row])
        unplaced = float(values[first[ids + 1] == first[ids]].sum())
        names, codes = lens.documents if by == "document" else lens.keys(table, by)
        elsewhere = 0.0
        if conditions:
            kept = lens.matching(table, conditions)[rows.ids]
            elsewhere = float(rows.values[~kept].sum())
            rows = Sums(rows.ids[kept], rows.values[kept])
        sums = sums_by_key(codes[rows.ids], rows.values, len(names))
        return Grouped(names, sums, elsewhere, self.beside + unplaced, None)

    def documents(self, limit: int = 10, where: Where | None = None) -> list[DocumentShare]:
        """Return the documents with the largest shares, as :meth:`Attribution.documents`."""
        lens, rows = self.lens, self.contexts
        conditions = normalised(where)
        if conditions:
            kept = lens.matching("index", conditions)[rows.ids]
            rows = Sums(rows.ids[kept], rows.values[kept])
        total = self.total
        if total <= 0:
            return []
        names, document_of_row = lens.documents
        document = document_of_row[rows.ids]
        ids, sums = sums_by_key(document, rows.values, len(names))
        best = np.argsort(-sums, kind="stable")[:limit]
        shares: list[DocumentShare] = []
        for number in best[sums[best] > 0].tolist():
            places = np.flatnonzero(document == ids[number])
            row = int(rows.ids[places[np.argmax(rows.values[places])]])
            place = lens.place(row)
            around = Around(*(place.pop(name) for name in Around._fields))
            read = partial(_same, None if around.token is None else around)
            share = float(sums[number] / total)
            shares.append(DocumentShare(share=share, read=read, **place))
        return shares

    def document_share(self, doc_id: str) -> float:
        """Return the share of one document; 0 where no context is of it."""
        rows = self.contexts
        names, codes = self.lens.documents
        if doc_id not in names or self.total <= 0:
            return 0.0
        mine = codes[rows.ids] == names.index(doc_id)
        return float(rows.values[mine].sum() / self.total)


def _same(around: Around | None) -> Around | None:
    return around


class ContextSum:
    """Adds up attributions of one lens and method; its size depends on the lens alone."""

    def __init__(self, lens: Lens, method: Method) -> None:
        self._lens, self._beside = lens, 0.0
        self._method: Method = method
        self._prototypes = np.zeros(lens.num_prototypes)
        self._contexts = np.zeros(lens.index.num_rows)

    def add(self, found: ContextAttribution) -> None:
        """Add the attribution of other positions."""
        self._beside += found.beside
        self._prototypes[found.prototypes.ids] += found.prototypes.values
        self._contexts[found.contexts.ids] += found.contexts.values

    def result(self) -> ContextAttribution:
        """Return the attribution of all positions so far."""
        prototypes, contexts = (
            Sums(np.flatnonzero(of), of[of != 0]) for of in (self._prototypes, self._contexts)
        )
        return ContextAttribution(self._lens, self._method, prototypes, contexts, self._beside)


def _rows_of(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of all ranges, one after another, and which range each belongs to."""
    owner, offset = each_of(counts)
    return starts[owner] + offset, owner


def _uniform(by_prototype: Sums, lens: Lens) -> Sums:
    ids, values = by_prototype
    starts, counts = lens.first_rows[ids], lens.first_rows[ids + 1] - lens.first_rows[ids]
    rows, owner = _rows_of(starts, counts)
    return Sums(rows, values[owner] / counts[owner])


def _by_similarity(
    position: np.ndarray, prototype: np.ndarray, weight: np.ndarray, states: Tensor, lens: Lens
) -> Sums:
    """Spread the uses of each position over the contexts of its prototypes; see the module.

    Uses are taken by prototype, so that the contexts of each are read once.
    """
    order = np.argsort(prototype, kind="stable")
    ids, starts, uses = np.unique(prototype[order], return_index=True, return_counts=True)
    contexts = lens.first_rows[ids + 1] - lens.first_rows[ids]
    numbers = np.cumsum(lens.states.shape[1] * (contexts + uses))
    part_of = numbers // NUMBERS_AT_ONCE
    parts: list[tuple[np.ndarray, ...]] = []
    for part in np.unique(part_of):
        batch = np.flatnonzero(part_of == part)
        chosen = order[starts[batch[0]] : starts[batch[-1]] + uses[batch[-1]]]
        of = np.repeat(np.arange(len(batch)), uses[batch])
        parts.append(_similar(ids[batch], of, position[chosen], weight[chosen], states, lens))
    count = len(states)
    has_text = lens.first_rows[prototype + 1] > lens.first_rows[prototype]
    evidence = np.bincount(position[has_text], weight[has_text], minlength=count)
    together = np.zeros(count)
    for _, _, of, weights in parts:
        together += np.bincount(of, weights, minlength=count)
    scale = np.divide(evidence, together, out=np.zeros(count), where=together > 0)
    # Prototypes ascend and no two share a row, so that rows are distinct and ascend as well.
    return Sums(
        np.concatenate([rows for rows, *_ in parts] or [np.empty(0, dtype=np.int64)]),
        np.concatenate(
            [
                np.bincount(row, weights * scale[of], minlength=len(rows))
                for rows, row, of, weights in parts
            ]
            or [np.empty(0)]
        ),
    )


def _similar(
    ids: np.ndarray,
    of: np.ndarray,
    position: np.ndarray,
    weight: np.ndarray,
    states: Tensor,
    lens: Lens,
) -> tuple[np.ndarray, ...]:
    """Weigh uses on the contexts of their prototypes, ids[of[use]].

    Returns:
        the rows of the index that the prototypes have; of each pair of a use and a context, int64
        [e]: the context's place in these rows, and the position of its use; and their weights,
        e⁺ exp((cos − 1) / temperature), before positions are made to add up.
    """
    first = lens.first_rows[ids]
    counts = lens.first_rows[ids + 1] - first
    rows, _ = _rows_of(first, counts)
    row, use = _rows_of((np.cumsum(counts) - counts)[of], counts[of])
    near = lens.states.index_select(0, torch.from_numpy(rows)).float()
    cosines = pair_products(
        torch.from_numpy(np.concatenate([[0], np.cumsum(counts[of])])),
        torch.from_numpy(row),
        states[torch.from_numpy(position)],
        near,
    )
    weights = np.exp((cosines.double().numpy() - 1) / CONTEXT_TEMPERATURE)
    return rows, row, position[use], weights * weight[use]
