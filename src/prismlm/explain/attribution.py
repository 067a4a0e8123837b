"""From prototypes to training text: which sources and documents carry a prediction.

By ``evidence``, over the prototypes i of every position asked about:

    share(s) = Σ_i e⁺_i · weight(s | i) / Σ (e⁺_i + e⁺_residual + e⁺_bias),  e⁺ = max(e, 0)

Roll-ups by source, domain and licence take weight(s | i) from each prototype's activation over the
whole corpus. Documents take it from kept contexts, by how similar their hidden state is to the one
being explained: the positive evidence of a position, of prototypes that have contexts, is spread
over the contexts c of all of them by

    e⁺_i exp(cos(state, c) / 0.02),   c among the contexts of prototype i

so that a near context counts more than a far one also where another prototype keeps it.
Unattributed is the share of residual, bias and prototypes that the corpus never uses.

By ``source``, the measure of PRISM, normalised to a sum of 1 over the positions:

    A_t = Σ_i α_ti μ_{S_i},   share(s) = Σ_t A_t(s) / Σ_t Σ_i α_ti

with S_i the kept contexts of prototype i and μ uniform over them, for every roll-up. It knows
neither the predicted token nor the residual, so only prototypes without contexts are unattributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.shares import (
    DocumentShare,
    Method,
    Share,
    Sources,
    Sums,
    add_up,
    check_by,
)
from prismlm.index.lens import Lens
from prismlm.index.where import Conditions, Where, normalised
from prismlm.ops.pair_products import pair_products

# The softmax temperature of cosines between hidden states: 0.02 of cosine is a factor of e.
CONTEXT_TEMPERATURE = 0.02
# How many float32 of hidden states are multiplied at once: 16 MB.
NUMBERS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Attribution:
    """What a set of positions relies on, before it is grouped. Sets without overlap add up.

    Attributes:
        lens: the lens the numbers belong to.
        method: ``evidence`` or ``source``.
        prototypes: positive evidence, or α, of each prototype.
        contexts: how it spreads over rows of the index; None if that was left out.
        beside: positive evidence of residual and bias.
    """

    lens: Lens
    method: Method
    prototypes: Sums
    contexts: Sums | None
    beside: float

    @property
    def total(self) -> float:
        """What shares are shares of."""
        return float(self.prototypes.values.sum()) + self.beside

    def sources(self, by: str = "source", where: Where | None = None) -> Sources:
        """Return shares by source, domain, license or document.

        Raises:
            InputError: ``by`` is none of those, or the filter names what is not there.
        """
        check_by(by)
        conditions = normalised(where)
        rows, names, codes, matching = self._placed(by, conditions)
        total = self.total
        if total <= 0:
            return Sources(by, (), 1.0, 0.0, conditions, self.method)
        kept = slice(None) if matching is None else matching[rows.ids]
        sums = _by_key(codes[rows.ids[kept]], rows.values[kept], len(names))
        order = np.argsort(-sums.values, kind="stable")
        items = tuple(
            Share(names[code], value / total)
            for code, value in zip(
                sums.ids[order].tolist(), sums.values[order].tolist(), strict=True
            )
            if value > 0
        )
        elsewhere = 0.0 if matching is None else float(rows.values[~matching[rows.ids]].sum())
        return Sources(
            by,
            items,
            (self.beside + self._unplaced(by)) / total,
            elsewhere / total,
            conditions,
            self.method,
        )

    def documents(self, limit: int = 10, where: Where | None = None) -> list[DocumentShare]:
        """Return the documents with the largest shares, each with its weightiest place.

        Raises:
            InputError: the filter names what is not there.
        """
        lens, rows = self.lens, self._rows()
        conditions = normalised(where)
        if conditions:
            kept = lens.matching("index", conditions)[rows.ids]
            rows = Sums(rows.ids[kept], rows.values[kept])
        total = self.total
        if total <= 0:
            return []
        names, document_of_row = lens.documents
        document = document_of_row[rows.ids]
        ids, sums = _by_key(document, rows.values, len(names))
        best = np.argsort(-sums, kind="stable")[:limit]
        shares: list[DocumentShare] = []
        for number in best[sums[best] > 0].tolist():
            places = np.flatnonzero(document == ids[number])
            row = int(rows.ids[places[np.argmax(rows.values[places])]])
            shares.append(DocumentShare(share=float(sums[number] / total), **lens.place(row)))
        return shares

    def document_share(self, document: int) -> float:
        """Return the share of one document, by its number in ``lens.documents``."""
        rows = self._rows()
        mine = self.lens.documents[1][rows.ids] == document
        return float(rows.values[mine].sum() / self.total) if self.total > 0 else 0.0

    def _rows(self) -> Sums:
        assert self.contexts is not None, "attribute(contexts=True) was not asked for"
        return self.contexts

    def _placed(
        self, by: str, conditions: Conditions
    ) -> tuple[Sums, list[str], np.ndarray, np.ndarray | None]:
        """Return rows of a table with what falls on them, the keys of all rows, and the filter."""
        lens = self.lens
        table = "index" if by == "document" or self.method == "source" else "mass"
        names, codes = lens.documents if by == "document" else lens.keys(table, by)
        matching = lens.matching(table, conditions) if conditions else None
        if table == "index":
            return self._rows(), names, codes, matching
        first = lens.first_masses
        ids, values = self.prototypes
        rows, owner = _ranges(first[ids], first[ids + 1] - first[ids])
        return Sums(rows, values[owner] * lens.mass_weights[rows]), names, codes, matching

    def _unplaced(self, by: str) -> float:
        from_index = by == "document" or self.method == "source"
        first = self.lens.first_rows if from_index else self.lens.first_masses
        ids, values = self.prototypes
        return float(values[first[ids + 1] == first[ids]].sum())


def attribute(
    table: EvidenceTable, lens: Lens, method: Method = "evidence", *, contexts: bool = True
) -> Attribution:
    """Gather what the positions rely on; ``contexts=False`` leaves out single places.

    Raises:
        InputError: no such method, or the table lacks the activations it needs.
    """
    uses = table.uses(method)
    if not contexts:
        rows = None
    elif method == "source":
        rows = _uniform(uses.by_prototype, lens)
    else:
        rows = _by_similarity(uses.position, uses.prototype, uses.weight, table.states, lens)
    return Attribution(
        lens,
        method,
        uses.by_prototype,
        rows,
        table.residual_and_bias if method == "evidence" else 0.0,
    )


def merge_attributions(parts: list[Attribution]) -> Attribution:
    """Return the attribution of all positions of the parts, which are of one lens and method."""
    contexts = [part.contexts for part in parts if part.contexts is not None]
    return Attribution(
        parts[0].lens,
        parts[0].method,
        add_up([part.prototypes for part in parts]),
        add_up(contexts) if len(contexts) == len(parts) else None,
        sum(part.beside for part in parts),
    )


def source_shares(
    table: EvidenceTable,
    lens: Lens,
    by: str = "source",
    *,
    method: Method = "evidence",
    where: Where | None = None,
) -> Sources:
    """Return the shares of the positions by source, domain, license or document.

    Args:
        table: the evidence of the positions.
        lens: the lens.
        by: the column.
        method: ``evidence``, or ``source`` for the measure of PRISM.
        where: only text that matches, such as ``{"license": "CC0"}``; the rest is ``elsewhere``.

    Raises:
        InputError: ``by``, ``method`` or ``where`` names what is not there.
    """
    needs_contexts = by == "document" or method == "source"
    return attribute(table, lens, method, contexts=needs_contexts).sources(by, where)


def document_shares(
    table: EvidenceTable,
    lens: Lens,
    limit: int = 10,
    *,
    method: Method = "evidence",
    where: Where | None = None,
) -> list[DocumentShare]:
    """Return the documents with the largest shares, each with its weightiest place.

    Raises:
        InputError: ``method`` or ``where`` names what is not there.
    """
    return attribute(table, lens, method).documents(limit, where)


def _by_key(codes: np.ndarray, values: np.ndarray, count: int) -> Sums:
    # Sorting pays where there are many more keys than amounts, as with documents.
    if count > len(codes):
        return add_up([Sums(codes, values)])
    return Sums(np.arange(count), np.bincount(codes, values, minlength=count))


def _ranges(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all ranges, one after another, and which range each belongs to."""
    owner = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts[owner] + offset, owner


def _uniform(by_prototype: Sums, lens: Lens) -> Sums:
    ids, values = by_prototype
    starts, counts = lens.first_rows[ids], lens.first_rows[ids + 1] - lens.first_rows[ids]
    rows, owner = _ranges(starts, counts)
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
    parts: list[_Similar] = []
    for part in np.unique(part_of):
        batch = np.flatnonzero(part_of == part)
        chosen = order[starts[batch[0]] : starts[batch[-1]] + uses[batch[-1]]]
        of = np.repeat(np.arange(len(batch)), uses[batch])
        parts.append(_similar(ids[batch], of, position[chosen], weight[chosen], states, lens))
    count = len(states)
    has_text = lens.first_rows[prototype + 1] > lens.first_rows[prototype]
    evidence = np.bincount(position[has_text], weight[has_text], minlength=count)
    together = np.zeros(count)
    for part in parts:
        together += np.bincount(part.position, part.weight, minlength=count)
    scale = np.divide(evidence, together, out=np.zeros(count), where=together > 0)
    # Prototypes ascend and no two share a row, so that rows are distinct and ascend as well.
    return Sums(
        np.concatenate([part.rows for part in parts] or [np.empty(0, dtype=np.int64)]),
        np.concatenate(
            [
                np.bincount(part.row, part.weight * scale[part.position], minlength=len(part.rows))
                for part in parts
            ]
            or [np.empty(0)]
        ),
    )


class _Similar(NamedTuple):
    """What uses of some prototypes put on contexts, before positions are made to add up.

    Attributes:
        rows: the rows of the index that the prototypes have.
        row: of each pair of a use and a context, the context's place in ``rows``, int64 [e].
        position: the position of its use.
        weight: e⁺ exp((cos − 1) / temperature).
    """

    rows: np.ndarray
    row: np.ndarray
    position: np.ndarray
    weight: np.ndarray


def _similar(
    ids: np.ndarray,
    of: np.ndarray,
    position: np.ndarray,
    weight: np.ndarray,
    states: Tensor,
    lens: Lens,
) -> _Similar:
    """Weigh uses on the contexts of their prototypes, ids[of[use]]."""
    first = lens.first_rows[ids]
    counts = lens.first_rows[ids + 1] - first
    rows, _ = _ranges(first, counts)
    row, use = _ranges((np.cumsum(counts) - counts)[of], counts[of])
    near = lens.states.index_select(0, torch.from_numpy(rows)).float()
    cosines = pair_products(
        torch.from_numpy(np.concatenate([[0], np.cumsum(counts[of])])),
        torch.from_numpy(row),
        states[torch.from_numpy(position)],
        near,
    )
    weights = np.exp((cosines.double().numpy() - 1) / CONTEXT_TEMPERATURE)
    return _Similar(rows, row, position[use], weights * weight[use])
