"""From prototypes to training text: which passages, documents and sources carry predictions.

Both methods spread the evidence over positions n of the corpus; documents, sources, domains and
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

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from prismlm.errors import check_choice
from prismlm.explain.positions import Carriers, Method
from prismlm.explain.rows import frame, table
from prismlm.explain.support import Support, Told, token_weights
from prismlm.lens.cells import largest
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.lens.lens import Lens
from prismlm.lens.text import Around
from prismlm.lens.where import Conditions, Where, normalised

if TYPE_CHECKING:
    import pandas

COLUMNS = ("document", *GROUP_COLUMNS)
# Places of one document that are no further apart than this, in tokens, are one passage; one that
# would be longer than LONGEST is cut.
GAP = 24
LONGEST = 128
# Tokens of a passage with at least this part of its largest weight are marked, too.
MIN_RELATIVE_WEIGHT = 0.1
# Of documents that carry at least so much of an answer, most are about its subject; of those that
# carry less, few (docs/results/asked.md).
WORTH_SHOWING = 0.03


@dataclass(frozen=True)
class Share:
    """One key, its share, and its share of all positions of the corpus, where that is known."""

    key: str
    share: float
    base_rate: float | None = None

    @property
    def lift(self) -> float | None:
        """How many times its base rate the share is."""
        return self.share / self.base_rate if self.base_rate else None

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"key", "share"}``; with ``base_rate`` and ``lift`` where they are known."""
        value: dict[str, Any] = {"key": self.key, "share": self.share}
        if self.base_rate is not None:
            value |= {"base_rate": self.base_rate, "lift": self.lift}
        return value


@dataclass(frozen=True)
class Sources:
    """Shares by one column, largest first; items, ``elsewhere`` and ``unattributed`` sum to 1.

    Attributes:
        by: the column.
        items: the keys; where a filter was given, of the text that matches it.
        unattributed: the share that no training text carries.
        elsewhere: the share of text that does not match the filter; 0 without one.
        where: the filter.
        method: ``evidence`` or ``source``.
    """

    by: str
    items: tuple[Share, ...]
    unattributed: float
    elsewhere: float = 0.0
    where: Conditions = ()
    method: Method = "evidence"

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"by", "items": [{"key", "share"}…], "unattributed"}``.

        With a filter, ``elsewhere`` and ``where`` too; ``method`` where it is not the default.
        """
        items = [item.to_dict() for item in self.items]
        value: dict[str, Any] = {"by": self.by, "items": items, "unattributed": self.unattributed}
        if self.where:
            value["elsewhere"] = self.elsewhere
            value["where"] = {column: list(values) for column, values in self.where}
        if self.method != "evidence":
            value["method"] = self.method
        return value

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per key, with the rest as further rows: shares sum to 1."""
        return frame(self._rows())

    def _repr_html_(self) -> str:
        return table(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        rest = [Share("elsewhere", self.elsewhere)] if self.elsewhere else []
        return [
            {self.by: one.key, "share": one.share, "base_rate": one.base_rate, "lift": one.lift}
            for one in (*self.items, *rest, Share("unattributed", self.unattributed))
        ]


@dataclass(frozen=True)
class Passage:
    """A stretch of a document that carries predictions, or a document with its weightiest place.

    Attributes:
        doc_id, source, domain, license, title, url: the document.
        share: of the passage, or of the whole document.
        position: of the marked token, as a global position of the corpus: the predicted token where
            it weighs most, or that of a context by ``source``.
        cosine: of the hidden state before the marked token to that of the prediction.
        length: tokens from the first place to the last.
        for_or_against: whether it supports or opposes the predictions.
        predicted: where it opposes them, the predicted token that did not come next there.
        probability: that the model gave to this token there.
    """

    doc_id: str
    share: float
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    position: int
    cosine: float = 0.0
    length: int = 1
    for_or_against: Literal["for", "against"] = "for"
    predicted: str | None = None
    probability: float | None = None
    lens: Lens | None = field(default=None, repr=False, compare=False)
    others: Sequence[int] | np.ndarray = field(default=(), repr=False, compare=False)

    @cached_property
    def around(self) -> Around | None:
        """The sentence around the marked token; None where there is no text at hand."""
        return None if self.lens is None else self.lens.sentence(self.position)

    @property
    def text(self) -> str | None:
        """The same as one text."""
        return None if self.around is None else str(self.around)

    @cached_property
    def also(self) -> list[tuple[int, int]]:
        """Where other tokens that carry predictions lie in ``text``; adjacent ones are joined."""
        return [] if self.lens is None else self.lens.spans_in_sentence(self.position, self.others)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        names = ("doc_id", "share", "source", "domain", "license", "title", "url", "text")
        value = {name: getattr(self, name) for name in (*names, "position", "cosine")}
        value |= {
            "token": None if self.around is None else self.around.token,
            "also": [list(span) for span in self.also],
            "for_or_against": self.for_or_against,
        }
        if self.for_or_against == "against":
            value |= {"predicted": self.predicted, "probability": self.probability}
        return value


def worth_showing(documents: Sequence[Passage]) -> list[Passage]:
    """Return the documents, largest share first, whose share is worth a reader's minute.

    That is at least 3 %; where the evidence is spread so thin that the first has under 6 %, at
    least half of the first's.
    """
    least = min(WORTH_SHOWING, documents[0].share / 2) if documents else 0.0
    return [document for document in documents if document.share >= least]


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


@dataclass(frozen=True)
class Attribution:
    """What predictions rely on, by positions of the corpus.

    Attributes:
        lens: the lens.
        places: amounts by place.
        rest: the amount that no place carries.
        told: what the predictions tell; None of many texts together.
        method: how the amounts were taken.
    """

    lens: Lens
    places: Places
    rest: float
    told: Told | None = None
    method: Method = "evidence"

    @property
    def total(self) -> float:
        """What shares are shares of."""
        return float(self.places.value.sum()) + self.rest

    @property
    def support(self) -> Support | None:
        """How well the corpus supports the predictions.

        None without predictions or a scale, where a state is zero, and where all that the scale
        was measured on were as near as one another.
        """
        scale, told = self.lens.support, self.told
        if told is None or scale is None or scale.nearest[0] == scale.nearest[-1]:
            return None
        known = len(told.tokens) and np.isfinite(told.nearest).all()
        return told.support(scale) if known else None

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
        elsewhere = float(value[~kept].sum()) / total
        number, value = number[kept], value[kept]
        if by == "document":
            names = cells.documents["doc_id"].take(number).to_pylist()
            rates = cells.document_rates[number]
        else:
            names, codes = cells.keys(by)
            value, rates = np.bincount(codes[number], value, len(names)), cells.base_rates(by)
        # Contexts are not drawn as positions are, so their shares have no base rate.
        known = self.method == "evidence"
        items = tuple(
            Share(names[i], float(value[i] / total), float(rates[i]) if known else None)
            for i in np.argsort(-value, kind="stable").tolist()
            if value[i] > 0
        )
        return Sources(by, items, self.rest / total, elsewhere, conditions, self.method)

    def documents(self, limit: int = 10, where: Where | None = None) -> list[Passage]:
        """Return the documents with the largest shares, each with its weightiest place."""
        number, value, best = self.by_document
        return [
            self._passage(int(best[i]), float(value[i] / self.total))
            for i in self._largest(value, number, limit, where)
        ]

    def passages(self, limit: int = 10, where: Where | None = None) -> list[Passage]:
        """Return the passages with the largest shares; places near one another are one passage."""
        (place, value, _), number, total = self.places, self._numbers, self.total
        if not len(place):
            return []
        first = _beginnings(place, number)
        sums, last = np.add.reduceat(value, first), np.append(first[1:], len(place))
        passages: list[Passage] = []
        for i in self._largest(sums, number[first], limit, where):
            within = slice(int(first[i]), int(last[i]))
            best = within.start + int(value[within].argmax())
            heavy = place[within][value[within] >= MIN_RELATIVE_WEIGHT * value[best]] + 1
            length = int(place[within][-1] - place[within][0]) + 1
            passages.append(self._passage(best, float(sums[i] / total), length, heavy))
        return passages

    def document_share(self, doc_id: str) -> float:
        """Return the share of one document; 0 where there is none of this id."""
        mine = self.by_document.number == self.lens.cells.document_number(doc_id)
        return float(self.by_document.value[mine].sum() / self.total) if self.total > 0 else 0.0

    def _passage(
        self, index: int, share: float, length: int = 1, others: Sequence[int] | np.ndarray = ()
    ) -> Passage:
        """Return the passage that is marked at one of the places."""
        facts = self.lens.cells.facts(int(self._numbers[index]))
        position = int(self.places.place[index]) + (self.method == "evidence")
        cosine = float(self.places.cosine[index])
        near: dict[str, Any] = {"cosine": cosine, "length": length, "others": others}
        return Passage(**facts, share=share, position=position, lens=self.lens, **near)

    def _largest(
        self, value: np.ndarray, number: np.ndarray, limit: int, where: Where | None
    ) -> list[int]:
        """Return where the largest amounts are, of those in documents that match a filter."""
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
        sizes = np.diff(np.append(first, len(number)))
        weightiest = np.flatnonzero(value == np.repeat(most, sizes))
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


def attribute(carriers: Carriers, lens: Lens, method: Method = "evidence") -> Attribution:
    """Return the sum over predictions of the positions that carry them."""
    prediction, place, cosine, value, tokens, unplaced, beside, nearest = carriers
    told, weights = None, np.ones(len(tokens))
    if method == "evidence":
        weights = token_weights(lens.cells.token_rates[tokens], len(lens.cells))
        near = cosine >= (1 if lens.support is None else lens.support.median)
        documents = lens.cells.document_of(place[near])
        told = Told(tokens, weights, nearest, np.stack([prediction[near], documents], axis=1))
    places = added_up(place, value * weights[prediction], cosine)
    return Attribution(lens, places, float((unplaced + beside) @ weights), told, method)


def joined(parts: Sequence[Attribution]) -> Attribution:
    """Return the attribution of successive predictions, of one lens and method, given in parts."""
    columns = (np.concatenate(column) for column in zip(*(p.places for p in parts), strict=True))
    told = [part.told for part in parts if part.told is not None]
    rest = sum(part.rest for part in parts)
    whole = Told.joined(told) if told else None
    return Attribution(parts[0].lens, added_up(*columns), rest, whole, parts[0].method)


class AttributionSum:
    """Adds up the attributions of many texts in memory that the lens alone sets.

    One place of each document, the weightiest, represents all of it.
    """

    def __init__(self, lens: Lens, method: Method) -> None:
        self._lens = lens
        self._method: Method = method
        self._value, self._most = np.zeros((2, lens.cells.documents.num_rows))
        self._place = np.full(len(self._value), -1, dtype=np.int64)
        self._rest = 0.0

    def add(self, attribution: Attribution) -> None:
        """Add the attribution of another text."""
        self._rest += attribution.rest
        number, value, best = attribution.by_document
        self._value[number] += value
        weight = attribution.places.value[best]
        better = weight > self._most[number]
        self._most[number[better]] = weight[better]
        self._place[number[better]] = attribution.places.place[best[better]]

    def result(self) -> Attribution:
        """Return the attribution of all texts so far; every document has one place."""
        kept = np.flatnonzero(self._place >= 0)
        places = Places(self._place[kept], self._value[kept], np.zeros(len(kept), np.float32))
        return Attribution(self._lens, places, self._rest, method=self._method)
