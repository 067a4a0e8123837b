"""From prototypes to training text: which sources and documents carry a prediction.

By ``evidence``, over the predictions asked about, e⁺ = max(e, 0):

    share(s) = Σ_n∈s a_n / Σ (Σ_i e⁺_i + e⁺_residual + e⁺_bias)

with a_n the evidence that falls on position n of the corpus (explain/positions.py). Documents,
sources, domains and licences are sums over the same positions. Unattributed is the share of
residual, bias and prototypes that no position which carries the prediction relies on.

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
        method: ``evidence`` or ``source``.
        so_far: of ``evidence``, what carried the predictions of the text before these, which are
            added to it; left out where the table knows its whole text.

    Raises:
        InputError: no such method, or the table lacks the activations it needs.
    """
    if method == "evidence":
        return by_position(table, lens, lens.cells, so_far)
    ids, values = table.uses(method).by_prototype
    first, counts = lens.first_rows[ids], lens.first_rows[ids + 1] - lens.first_rows[ids]
    owner, offset = each_of(counts)
    rows = Sums(first[owner] + offset, values[owner] / counts[owner])
    unplaced = float(values[counts == 0].sum())
    return SourceAttribution(lens, float(values.sum()), unplaced, rows)


def merge_attributions(parts: list[Attribution]) -> Attribution:
    """Return the attribution of all positions of the parts, which are of one lens and method."""
    if isinstance(parts[0], PositionAttribution):
        return merge_positions(cast(list[PositionAttribution], parts))
    total = SourceSum(parts[0].lens)
    for part in cast(list[SourceAttribution], parts):
        total.add(part)
    return total.result()


def sum_of(lens: Lens, method: Method) -> PositionSum | SourceSum:
    """Return what adds up the attributions of many texts in memory that the lens alone sets."""
    return PositionSum(lens, lens.cells) if method == "evidence" else SourceSum(lens)


@dataclass(frozen=True)
class SourceAttribution(Attribution):
    """What positions rely on, by the kept contexts of the prototypes in use.

    Attributes:
        lens: the lens the numbers belong to.
        used: Σ α.
        unplaced: that of prototypes without contexts.
        contexts: how the rest spreads over rows of the index.
    """

    lens: Lens
    used: float
    unplaced: float
    contexts: Sums
    method: Method = "source"

    @property
    def total(self) -> float:
        """What shares are shares of."""
        return self.used

    def _rows(self, conditions: Conditions) -> Sums:
        if not conditions:
            return self.contexts
        kept = self.lens.matching("index", conditions)[self.contexts.ids]
        return Sums(self.contexts.ids[kept], self.contexts.values[kept])

    def grouped(self, by: str, conditions: Conditions) -> Grouped:
        """Return the amounts by the keys of a column, with a filter."""
        rows = self._rows(conditions)
        names, codes = self.lens.documents if by == "document" else self.lens.keys("index", by)
        sums = sums_by_key(codes[rows.ids], rows.values, len(names))
        elsewhere = float(self.contexts.values.sum() - rows.values.sum())
        return Grouped(names, sums, elsewhere, self.unplaced, None)

    def documents(self, limit: int = 10, where: Where | None = None) -> list[DocumentShare]:
        """Return the documents with the largest shares, as :meth:`Attribution.documents`."""
        rows, (names, of_row) = self._rows(normalised(where)), self.lens.documents
        if self.total <= 0:
            return []
        document = of_row[rows.ids]
        ids, sums = sums_by_key(document, rows.values, len(names))
        best = np.argsort(-sums, kind="stable")[:limit]
        shares: list[DocumentShare] = []
        for number in best[sums[best] > 0].tolist():
            places = np.flatnonzero(document == ids[number])
            place = self.lens.place(int(rows.ids[places[np.argmax(rows.values[places])]]))
            around = Around(*(place.pop(name) for name in Around._fields))
            read = partial(_same, None if around.token is None else around)
            share = float(sums[number] / self.total)
            shares.append(DocumentShare(share=share, read=read, **place))
        return shares

    def document_share(self, doc_id: str) -> float:
        """Return the share of one document; 0 where no context is of it."""
        names, codes = self.lens.documents
        if doc_id not in names or self.total <= 0:
            return 0.0
        mine = codes[self.contexts.ids] == names.index(doc_id)
        return float(self.contexts.values[mine].sum() / self.total)


def _same(around: Around | None) -> Around | None:
    return around


class SourceSum:
    """Adds up attributions of one lens; its size depends on the lens alone."""

    def __init__(self, lens: Lens) -> None:
        self._lens, self._used, self._unplaced = lens, 0.0, 0.0
        self._contexts = np.zeros(lens.index.num_rows)

    def add(self, found: SourceAttribution) -> None:
        """Add the attribution of other positions."""
        self._used += found.used
        self._unplaced += found.unplaced
        self._contexts[found.contexts.ids] += found.contexts.values

    def result(self) -> SourceAttribution:
        """Return the attribution of all positions so far."""
        ids = np.flatnonzero(self._contexts)
        contexts = Sums(ids, self._contexts[ids])
        return SourceAttribution(self._lens, self._used, self._unplaced, contexts)
