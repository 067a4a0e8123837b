"""From prototypes to training text: which passages, documents and sources carry predictions.

Both methods spread what counts over positions n of the corpus; documents, sources, domains and
licences are sums over these. By ``evidence``, with e⁺ = max(e, 0) and w_t what a token tells
(:mod:`prismlm.explain.support`),

    share(s) = Σ_n∈s a_n / Σ_t w_t (Σ_i e⁺_ti + e⁺_residual + e⁺_bias)

with a_n the evidence that falls on position n (:mod:`prismlm.explain.positions`). Unattributed is
the share of residual, bias and prototypes that no position which carries the prediction relies on.

By ``source``, the measure of PRISM, normalised to a sum of 1 over the positions:

    A_t = Σ_i α_ti μ_{S_i},   share(s) = Σ_t A_t(s) / Σ_t Σ_i α_ti

with S_i the kept contexts of prototype i and μ uniform over them. It knows neither the predicted
token nor the residual, so only prototypes without contexts are unattributed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from prismlm.errors import check_choice
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.positions import DocumentsSoFar, supports, supports_of
from prismlm.explain.shares import DocumentShare, Method, Passage, Share, Sources
from prismlm.explain.support import Support, support_of, token_weights
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.lens.lens import Lens
from prismlm.lens.neighbours import each_of, largest
from prismlm.lens.where import Where, normalised

COLUMNS = ("document", *GROUP_COLUMNS)
# Places of one document that are no further apart than this, in tokens, are one passage; one that
# would be longer than LONGEST is cut.
GAP = 24
LONGEST = 128
# Tokens of a passage with at least this part of its largest weight are marked, too.
MIN_RELATIVE_WEIGHT = 0.1


class Places(NamedTuple):
    """Places that carry predictions: distinct and ascending.

    Attributes:
        place: global positions of hidden states, int64 [n].
        value: amounts, float64 [n].
        cosine: the largest to a prediction's state, float32 [n].
    """

    place: np.ndarray
    value: np.ndarray
    cosine: np.ndarray


class Documents(NamedTuple):
    """Amounts by document: distinct and ascending.

    Attributes:
        number: rows of the table of documents, int64 [n].
        value: amounts, float64 [n].
        best: the index of the weightiest place among those of all documents, int64 [n].
    """

    number: np.ndarray
    value: np.ndarray
    best: np.ndarray


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Attribution:
    """What predictions rely on, by positions of the corpus.

    Attributes:
        lens: the lens.
        places: amounts by place.
        unplaced: the amount of prototypes that no place carries.
        beside: positive evidence of residual and bias.
        nearest: the nearest cosine of each prediction, float32 [T]; NaN of a state of zero.
        tokens: that were predicted, int64 [T].
        telling: w of each, float64 [T].
        carried: which document carries which prediction: (prediction, document), int64 [m, 2].
        method: how the amounts were taken.
    """

    lens: Lens
    places: Places
    unplaced: float
    beside: float
    nearest: np.ndarray = field(default_factory=_none)
    tokens: np.ndarray = field(default_factory=_none)
    telling: np.ndarray = field(default_factory=_none)
    carried: np.ndarray = field(default_factory=lambda: _none().reshape(0, 2))
    method: Method = "evidence"

    @property
    def total(self) -> float:
        """What shares are shares of."""
        return float(self.places.value.sum()) + self.unplaced + self.beside

    @property
    def support(self) -> Support | None:
        """How well the corpus supports the predictions.

        None without predictions or a scale, where a state is zero, and where all that the scale
        was measured on were as near as one another.
        """
        scale = self.lens.support
        if scale is None or not len(self.telling) or scale.nearest[0] == scale.nearest[-1]:
            return None
        if not np.isfinite(self.nearest).all():
            return None
        return support_of(self.nearest, scale, self.tokens, self.telling, self.carried)

    def sources(self, by: str = "source", where: Where | None = None) -> Sources:
        """Return shares by source, domain, license or document.

        Raises:
            InputError: ``by`` is none of those, or the filter names what is not there.
        """
        check_choice("what shares are taken by", by, COLUMNS)
        conditions, cells, total = normalised(where), self.lens.cells, self.total
        number, value, _ = self.by_document
        kept = cells.matching(conditions)[number] if conditions else np.ones(len(number), bool)
        if total <= 0:
            return Sources(by, (), 1.0, 0.0, conditions, self.method)
        elsewhere = float(value[~kept].sum())
        number, value = number[kept], value[kept]
        if by == "document":
            names = cells.documents["doc_id"].take(number).to_pylist()
            rates = cells.document_rates[number]
        else:
            names, codes = cells.keys(by)
            value, rates = np.bincount(codes[number], value, len(names)), cells.base_rates(by)
        items = tuple(
            Share(names[i], float(value[i] / total), self._base_rate(rates[i]))
            for i in np.argsort(-value, kind="stable").tolist()
            if value[i] > 0
        )
        unattributed = (self.unplaced + self.beside) / total
        return Sources(by, items, unattributed, elsewhere / total, conditions, self.method)

    def _base_rate(self, rate: float) -> float | None:
        """Contexts are not drawn as positions are, so their shares have no base rate."""
        return float(rate) if self.method == "evidence" else None

    def documents(self, limit: int = 10, where: Where | None = None) -> list[DocumentShare]:
        """Return the documents with the largest shares, each with its weightiest place."""
        (number, value, best), total = self.by_document, self.total
        return [
            DocumentShare(share=float(value[i] / total), **self._facts(int(number[i]), best[i]))
            for i in self._largest(value, number, limit, where)
        ]

    def passages(self, limit: int = 10, where: Where | None = None) -> list[Passage]:
        """Return the passages with the largest shares; places near one another are one passage."""
        (place, value, cosine), number, total = self.places, self._numbers, self.total
        if not len(place):
            return []
        first = _beginnings(place, number)
        sums, last = np.add.reduceat(value, first), np.append(first[1:], len(place))
        passages: list[Passage] = []
        for i in self._largest(sums, number[first], limit, where):
            within = slice(int(first[i]), int(last[i]))
            best = within.start + int(value[within].argmax())
            heavy = place[within][value[within] >= MIN_RELATIVE_WEIGHT * value[best]] + 1
            passages.append(
                Passage(
                    share=float(sums[i] / total),
                    cosine=float(cosine[best]),
                    length=int(place[within][-1] - place[within][0]) + 1,
                    read_also=partial(self.lens.beside, int(place[best]) + 1, heavy),
                    **self._facts(int(number[best]), best),
                    **self.marked(best),
                )
            )
        return passages

    def marked(self, index: int) -> dict[str, Any]:
        """Return what a passage says of its weightiest place, beside where it is."""
        return {}

    def document_share(self, doc_id: str) -> float:
        """Return the share of one document; 0 where there is none of this id."""
        mine = self.by_document.number == self.lens.cells.document_number(doc_id)
        return float(self.by_document.value[mine].sum() / self.total) if self.total > 0 else 0.0

    def _facts(self, number: int, index: int) -> dict[str, Any]:
        """Return a document, and its place: the predicted token, or that of a context."""
        position = int(self.places.place[index]) + (self.method == "evidence")
        read = partial(self.lens.sentence, position)
        return {**self.lens.cells.facts(number), "position": position, "read": read}

    def _largest(
        self, value: np.ndarray, number: np.ndarray, limit: int, where: Where | None
    ) -> list[int]:
        """Return where the largest amounts stand, of those in documents that match a filter."""
        conditions = normalised(where)
        if conditions:
            value = np.where(self.lens.cells.matching(conditions)[number], value, 0)
        order = largest(value, limit)
        return order[value[order] > 0].tolist()

    @cached_property
    def by_document(self) -> Documents:
        """The amounts of places by document."""
        value, number = self.places.value, self._numbers
        first = np.flatnonzero(np.diff(number, prepend=-1))
        if not len(first):
            return Documents(number, value, number)
        sums, most = (f.reduceat(value, first) for f in (np.add, np.maximum))
        weightiest = np.flatnonzero(
            value == np.repeat(most, np.diff(np.append(first, len(number))))
        )
        return Documents(number[first], sums, weightiest[np.searchsorted(weightiest, first)])

    @cached_property
    def _numbers(self) -> np.ndarray:
        return self.lens.cells.document_of(self.places.place)


def _beginnings(place: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return which of some places, in documents of these numbers, are the first of a passage."""
    apart = np.zeros(len(place), dtype=bool)
    apart[1:] = (np.diff(place) > GAP) | (np.diff(number) > 0)
    runs = np.append(0, np.flatnonzero(apart))
    piece = (place - place[runs[np.cumsum(apart)]]) // LONGEST
    apart[1:] |= np.diff(piece) != 0
    return np.append(0, np.flatnonzero(apart))


def added_up(place: np.ndarray, value: np.ndarray, cosine: np.ndarray) -> Places:
    """Return places with the sum of their values and the largest of their cosines."""
    # Places come as ranges that ascend, which a stable sort merges.
    order = np.argsort(place, kind="stable")
    place = place[order]
    first = np.flatnonzero(np.diff(place, prepend=-1))
    if not len(first):
        return Places(place, value, cosine)
    sums, nearest = np.add.reduceat(value[order], first), np.maximum.reduceat(cosine[order], first)
    return Places(place[first], sums, nearest)


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
    if method != "evidence":
        return _by_source(table, lens, method)
    cells = lens.cells
    if so_far is None:
        found = supports_of(table, cells, lens.head)
    else:
        found = supports(table, cells, lens.head, so_far)
    tokens = table.targets.numpy()
    weights = token_weights(cells.token_rates[tokens], len(cells))
    near = found.cosine >= (1 if lens.support is None else lens.support.median)
    return Attribution(
        lens,
        added_up(found.place, found.weight * weights[found.prediction], found.cosine),
        float(found.unplaced @ weights),
        float(table.beside @ weights),
        np.where(table.states.any(dim=1).numpy(), found.nearest, np.float32(np.nan)),
        tokens,
        weights,
        np.stack([found.prediction[near], cells.document_of(found.place[near])], axis=1),
    )


def _by_source(table: EvidenceTable, lens: Lens, method: Method) -> Attribution:
    """Return A_t summed over the predictions: α of each prototype, spread over its contexts."""
    _, prototype, alpha = table.uses(method)
    first = lens.first_rows[prototype]
    counts = lens.first_rows[prototype + 1] - first
    use, context = each_of(counts)
    rows = lens.index.take(first[use] + context)
    places = added_up(
        rows["position"].to_numpy(),
        (alpha / np.maximum(counts, 1))[use],
        rows["cosine"].to_numpy(),
    )
    return Attribution(lens, places, float(alpha[counts == 0].sum()), 0.0, method=method)


def merge_attributions(parts: list[Attribution]) -> Attribution:
    """Return the attribution of all positions of the parts, which are of one lens and method."""
    columns = [np.concatenate(column) for column in zip(*(p.places for p in parts), strict=True)]
    firsts = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
    return Attribution(
        parts[0].lens,
        added_up(*columns),
        sum(part.unplaced for part in parts),
        sum(part.beside for part in parts),
        np.concatenate([part.nearest for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.telling for part in parts]),
        np.concatenate(
            [part.carried + np.array([first, 0]) for part, first in zip(parts, firsts, strict=True)]
        ),
        parts[0].method,
    )


class AttributionSum:
    """Adds up the attributions of many texts in memory that the lens alone sets.

    One place of each document, the weightiest, stands for all of it.
    """

    def __init__(self, lens: Lens, method: Method) -> None:
        self._lens = lens
        self._method: Method = method
        self._value, self._most = np.zeros((2, lens.cells.documents.num_rows))
        self._place = np.full(len(self._value), -1, dtype=np.int64)
        self._unplaced = self._beside = 0.0

    def add(self, found: Attribution) -> None:
        """Add the attribution of other predictions."""
        self._unplaced += found.unplaced
        self._beside += found.beside
        number, value, best = found.by_document
        self._value[number] += value
        weight = found.places.value[best]
        better = weight > self._most[number]
        self._most[number[better]] = weight[better]
        self._place[number[better]] = found.places.place[best[better]]

    def result(self) -> Attribution:
        """Return the attribution of all predictions so far; every document has one place."""
        kept = np.flatnonzero(self._place >= 0)
        places = Places(self._place[kept], self._value[kept], np.zeros(len(kept), np.float32))
        return Attribution(self._lens, places, self._unplaced, self._beside, method=self._method)
