"""Passages: the places of the corpus behind predictions, put together, with shares of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from prismlm.explain.answer_weights import token_weights
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.positions import DocumentsSoFar, supports, supports_of
from prismlm.explain.shares import (
    Attribution,
    DocumentShare,
    Grouped,
    Method,
    Sums,
    sums_by_key,
)
from prismlm.explain.support import Support, support_of
from prismlm.index.cells import Cells
from prismlm.index.lens import Lens
from prismlm.index.neighbours import largest
from prismlm.index.where import Conditions, Where, normalised

# Places of one document that are no further apart than this, in tokens, are one passage; one that
# would be longer than LONGEST is cut.
GAP = 24
LONGEST = 128
# Beside its marked token, those of a passage with at least this part of its weight are told.
TOLD = 0.1


@dataclass(frozen=True)
class Passage(DocumentShare):
    """A stretch of a document that carries predictions; ``position`` is of its marked token.

    The marked token is the predicted one, where it weighs most; ``around`` is its sentence.

    Others that carry predictions are ``also`` marked: where they lie in ``text``.

    Attributes:
        cosine: of the hidden state before the marked token to that of the prediction.
        length: tokens from the first place to the last.
        for_or_against: whether it speaks for the predictions.
        predicted: of what speaks against: the predicted token that did not come next there.
        probability: that the model gave to this token there.
    """

    cosine: float = 0.0
    length: int = 1
    for_or_against: Literal["for", "against"] = "for"
    predicted: str | None = None
    probability: float | None = None
    read_also: Callable[[], list[tuple[int, int]]] = field(default=list, repr=False, compare=False)

    @cached_property
    def also(self) -> list[tuple[int, int]]:
        """Where other tokens that carry predictions lie in ``text``; next ones are joined."""
        return self.read_also()

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        around = self.around
        opposed = {"predicted": self.predicted, "probability": self.probability}
        return {
            **super().to_dict(),
            "domain": self.domain,
            "title": self.title,
            "url": self.url,
            "token": None if around is None else around.token,
            "also": [list(span) for span in self.also],
            "cosine": self.cosine,
            "for_or_against": self.for_or_against,
            **(opposed if self.for_or_against == "against" else {}),
        }


class Places(NamedTuple):
    """Places that carry predictions: distinct and ascending.

    Attributes:
        place: global positions of hidden states, int64 [n].
        value: evidence, float64 [n].
        cosine: the largest to a prediction's state, float32 [n].
    """

    place: np.ndarray
    value: np.ndarray
    cosine: np.ndarray


class Documents(NamedTuple):
    """Evidence by document: distinct and ascending.

    Attributes:
        number: rows of the table of documents, int64 [n].
        value: evidence, float64 [n].
        best: the index of the weightiest place among those of all documents, int64 [n].
    """

    number: np.ndarray
    value: np.ndarray
    best: np.ndarray


@dataclass(frozen=True)
class PositionAttribution(Attribution):
    """What predictions rely on, by the positions of the corpus that carry them.

    Attributes:
        lens: the lens.
        cells: its positions.
        places: evidence by place.
        unplaced: evidence of prototypes that no weighty place of their prediction relies on.
        beside: positive evidence of residual and bias.
        nearest: the nearest cosine of each prediction, float32 [T]; NaN of a state of zero.
        tokens: that were predicted, int64 [T].
        telling: w of each, float64 [T].
        carried: which document carries which prediction: (prediction, document), int64 [m, 2].
        method: ``evidence``.
    """

    lens: Lens
    cells: Cells
    places: Places
    unplaced: float
    beside: float
    nearest: np.ndarray
    tokens: np.ndarray
    telling: np.ndarray = field(default_factory=lambda: np.empty(0))
    carried: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    method: Method = "evidence"

    @property
    def total(self) -> float:
        """What shares are shares of."""
        return float(self.places.value.sum()) + self.unplaced + self.beside

    @property
    def support(self) -> Support | None:
        """How well the corpus supports the predictions; None without any, or without a scale.

        Nor is it known where a state is zero, or where all that the scale was measured on were as
        near as one another.
        """
        scale, nearest = self.lens.support, self.nearest
        if scale is None or not len(self.telling) or scale.nearest[0] == scale.nearest[-1]:
            return None
        if not np.isfinite(nearest).all():
            return None
        return support_of(nearest, scale, self.tokens, self.telling, self.carried)

    def grouped(self, by: str, conditions: Conditions) -> Grouped:
        """Return the amounts by the keys of a column, with a filter."""
        found, cells = self.by_document, self.cells
        number, value = found.number, found.value
        elsewhere = 0.0
        if conditions:
            kept = cells.matching(conditions)[number]
            elsewhere = float(value[~kept].sum())
            number, value = number[kept], value[kept]
        unattributed = self.unplaced + self.beside
        if by == "document":
            ids = cells.documents["doc_id"].take(number).to_pylist()
            sums, rates = Sums(np.arange(len(ids)), value), cells.document_rates[number]
            return Grouped(ids, sums, elsewhere, unattributed, rates)
        names, codes = cells.keys(by)
        sums = sums_by_key(codes[number], value, len(names))
        return Grouped(names, sums, elsewhere, unattributed, cells.base_rates(by))

    def documents(self, limit: int = 10, where: Where | None = None) -> list[DocumentShare]:
        """Return the documents with the largest shares, as :meth:`Attribution.documents`."""
        found, total = self.by_document, self.total
        return [
            DocumentShare(
                share=float(found.value[i] / total),
                **self._told(int(found.number[i]), int(self.places.place[found.best[i]])),
            )
            for i in self._largest(found.value, found.number, limit, where)
        ]

    def passages(self, limit: int = 10, where: Where | None = None) -> list[Passage]:
        """Return the passages with the largest shares; what is near one another is one passage.

        Raises:
            InputError: the filter names what is not there.
        """
        (place, value, cosine), total = self.places, self.total
        if not len(place):
            return []
        number = self._numbers
        first = _beginnings(place, number)
        sums = np.add.reduceat(value, first)
        last = np.append(first[1:], len(place))
        passages: list[Passage] = []
        for i in self._largest(sums, number[first], limit, where):
            within = slice(int(first[i]), int(last[i]))
            best = within.start + int(value[within].argmax())
            told = place[within][value[within] >= TOLD * value[best]] + 1
            passages.append(
                Passage(
                    share=float(sums[i] / total),
                    cosine=float(cosine[best]),
                    length=int(place[within][-1] - place[within][0]) + 1,
                    read_also=partial(self.lens.beside, int(place[best]) + 1, told),
                    **self._told(int(number[best]), int(place[best])),
                    **self.marked(best),
                )
            )
        return passages

    def marked(self, index: int) -> dict[str, Any]:
        """Return what a passage says of its weightiest place, beside where it is."""
        return {}

    def document_share(self, doc_id: str) -> float:
        """Return the share of one document; 0 where there is none of this id."""
        found = self.by_document
        mine = found.number == self.cells.document_number(doc_id)
        return float(found.value[mine].sum() / self.total) if self.total > 0 else 0.0

    def _told(self, number: int, place: int) -> dict[str, Any]:
        """Return what is said of the token that follows a place."""
        read = partial(self.lens.sentence, place + 1)
        return {**self.cells.facts(number), "position": place + 1, "read": read}

    def _largest(
        self, value: np.ndarray, number: np.ndarray, limit: int, where: Where | None
    ) -> list[int]:
        """Return where the largest amounts stand, of those in documents that match a filter."""
        conditions = normalised(where)
        if conditions:
            value = np.where(self.cells.matching(conditions)[number], value, 0)
        order = largest(value, limit)
        return order[value[order] > 0].tolist()

    @cached_property
    def by_document(self) -> Documents:
        """The evidence of places by document."""
        return by_document(self._numbers, self.places)

    @cached_property
    def _numbers(self) -> np.ndarray:
        return self.cells.document_of(self.places.place)


def _beginnings(place: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return which of some places, in documents of these numbers, are the first of a passage."""
    apart = np.zeros(len(place), dtype=bool)
    apart[1:] = (np.diff(place) > GAP) | (np.diff(number) > 0)
    runs = np.append(0, np.flatnonzero(apart))
    piece = (place - place[runs[np.cumsum(apart)]]) // LONGEST
    apart[1:] |= np.diff(piece) != 0
    return np.append(0, np.flatnonzero(apart))


def by_document(number: np.ndarray, places: Places) -> Documents:
    """Return the evidence of places, in documents of these numbers, by document."""
    first = np.flatnonzero(np.diff(number, prepend=-1))
    if not len(first):
        return Documents(number, places.value, number)
    sums, most = (f.reduceat(places.value, first) for f in (np.add, np.maximum))
    sizes = np.diff(np.append(first, len(number)))
    weightiest = np.flatnonzero(places.value == np.repeat(most, sizes))
    return Documents(number[first], sums, weightiest[np.searchsorted(weightiest, first)])


def by_position(
    table: EvidenceTable, lens: Lens, cells: Cells, so_far: DocumentsSoFar | None = None
) -> PositionAttribution:
    """Gather what predictions rely on; ``so_far`` is what carried the text before the table's."""
    if so_far is None:
        found = supports_of(table, cells, lens.head)
    else:
        found = supports(table, cells, lens.head, so_far)
    alive = table.states.any(dim=1).numpy()
    tokens = table.targets.numpy()
    weights = token_weights(cells.token_rates[tokens], len(cells))
    near = found.cosine >= (1 if lens.support is None else lens.support.median)
    return PositionAttribution(
        lens,
        cells,
        added_up(found.place, found.weight * weights[found.prediction], found.cosine),
        float(found.unplaced @ weights),
        float(table.beside @ weights),
        np.where(alive, found.nearest, np.float32(np.nan)),
        tokens,
        weights,
        np.stack([found.prediction[near], cells.document_of(found.place[near])], axis=1),
    )


def merge_positions(parts: list[PositionAttribution]) -> PositionAttribution:
    """Return the attribution of all positions of the parts."""
    columns = (np.concatenate(column) for column in zip(*(p.places for p in parts), strict=True))
    firsts = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
    return PositionAttribution(
        parts[0].lens,
        parts[0].cells,
        added_up(*columns),
        sum(part.unplaced for part in parts),
        sum(part.beside for part in parts),
        np.concatenate([part.nearest for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.telling for part in parts]),
        np.concatenate(
            [part.carried + np.array([first, 0]) for part, first in zip(parts, firsts, strict=True)]
        ),
    )


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


class PositionSum:
    """Adds up attributions of one lens: one place of each document stands for all of it."""

    def __init__(self, lens: Lens, cells: Cells) -> None:
        self._lens, self._cells = lens, cells
        count = cells.documents.num_rows
        self._value, self._most = np.zeros((2, count))
        self._place = np.full(count, -1, dtype=np.int64)
        self._cosine = np.zeros(count, dtype=np.float32)
        self._unplaced = self._beside = 0.0

    def add(self, found: PositionAttribution) -> None:
        """Add the attribution of other predictions."""
        self._unplaced += found.unplaced
        self._beside += found.beside
        numbers = self._cells.document_of(found.places.place)
        number, value, best = by_document(numbers, found.places)
        self._value[number] += value
        weight = found.places.value[best]
        better = weight > self._most[number]
        self._most[number[better]] = weight[better]
        self._place[number[better]] = found.places.place[best[better]]
        self._cosine[number[better]] = found.places.cosine[best[better]]

    def result(self) -> PositionAttribution:
        """Return the attribution of all predictions so far; every document has one place."""
        kept = np.flatnonzero(self._place >= 0)
        places = Places(self._place[kept], self._value[kept], self._cosine[kept])
        nothing = np.empty(0, dtype=np.float32)
        return PositionAttribution(
            self._lens,
            self._cells,
            places,
            self._unplaced,
            self._beside,
            nothing,
            nothing.astype(np.int64),
        )
