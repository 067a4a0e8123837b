"""From prototypes to training text: which positions, documents and sources carry predictions.

The output layer of a trained model is, up to its regularisation λ, a sum over its training
positions n (representer theorem, Yeh et al. 2018, with next tokens y_n and hidden states z_n):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n·z / λ

So the text that supports y at a state z is where y came next and the state was near. Prototypes
say where to look: cell i holds the positions whose nearest prototype is i. In the cells of the
prototypes with positive evidence e⁺_i for y, each position n with y_n = y has the weight

    w_n = k_n · r_t(d_n)        k_n = exp((cos(z, z_n) − 1) / T) · (B if x_n = x else 1)

with the tokens x_n and x that were read last: what a training step on position n changes in the
embedding of x_n is not used by predictions after another token. The positive evidence is spread
over all these positions together in proportion to w_n; by prototype, a cell with one poor position
would give it everything. The evidence of a prototype is spread only if one of the four heaviest
positions relies on the prototype too: it is at least as near to it as the prediction is to the last
of its own k, or, with fitted weights, nine tenths as near as the prediction is. The evidence of the
other prototypes, of the residual and of the bias is unattributed.

The factor r is a context prior: texts stay on topic, so a domain, and in it a document, that
carried the predictions before is likelier to carry this one than its size alone suggests. Domains
are the states of a hidden Markov model (Rabiner 1989, the forward pass). With π(g) a domain's share
of all positions, a text is of domain g with probability p_t(g), at first π(g). A prediction is of
the text's domain or, with probability ρ, of any; L_t(g) says how likely it is in domain g; and the
text turns to a domain drawn from π once in h predictions:

    L_t(g) = Σ_{n of g} k_n / (π(g) Σ_n k_n)
    p_{t+1}(g) = (1 − 1/h) p_t(g) (ρ + (1 − ρ) L_t(g)) / Z_t + π(g) / h

Documents are too many and too small for a model of states: with q_s(d) the part of an earlier
prediction s that fell on document d, π(d) its share of all positions,

    A(d) = Σ_{s<t} 2^{−(t−1−s)/h} q_s(d)            A = Σ_d A(d)
    r_t(d) = (C p_t(g) / π(g) + A(d) / π(d)) / (C + A)        d a document of domain g

which is the mean of a Dirichlet posterior about the domains, divided by the document's share. The
first prediction of a text has r = 1. What carries a prediction does not depend on later ones.

With a_n the evidence on position n and w_t the information of a token (:mod:`prismlm.explain.
support`), shares of documents, sources, domains and licences s are

    share(s) = Σ_n∈s a_n / Σ_t w_t (Σ_i e⁺_ti + e⁺_residual + e⁺_bias)

The method ``source`` is the measure of PRISM instead, normalised to a sum of 1:

    A_t = Σ_i α_ti μ_{S_i},   share(s) = Σ_t A_t(s) / Σ_t Σ_i α_ti

with S_i the stored contexts of prototype i and μ uniform over them. It depends neither on the
predicted token nor on the residual, so only prototypes without contexts are unattributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prismlm.errors import check_choice
from prismlm.explain.prediction import Predictions
from prismlm.explain.rows import frame, html_table
from prismlm.explain.support import Coverage, Support, token_information
from prismlm.layers import PrototypeHead
from prismlm.lens.cells import (
    Cells,
    Conditions,
    Where,
    group_members,
    largest,
    nearest_of,
    neighbours,
    normalised,
)
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.lens.lens import Lens
from prismlm.lens.text import Around

if TYPE_CHECKING:
    import pandas

Method = Literal["evidence", "source"]
METHODS: tuple[str, ...] = get_args(Method)
COLUMNS = ("document", *GROUP_COLUMNS)
# T, and B: positions after the same token count so many times.
TEMPERATURE = 0.3
SAME_TOKEN = 10.0
# ρ, and C and h in predictions.
STRAY = 0.9
CONCENTRATION = 1000.0
SPAN = 6.0
MAX_UNIT = 1e100
# The number of heaviest positions, one of which must rely on a prototype; with fitted weights
# "relies on" is this part of the prediction's own cosine.
HEAVIEST = 4
FITTED_COSINE_RATIO = 0.9
# Positions below this part of the heaviest weight are left out.
MIN_WEIGHT_RATIO = 1e-6
# Positions of one document with at most this gap, in tokens, are one passage, cut at the length.
GAP = 24
MAX_PASSAGE = 128
# Further tokens of a passage are marked if they have this part of its largest weight.
MARKED_WEIGHT_RATIO = 0.1
# Of documents with at least this share of an answer, most are about its subject; of those with
# less, few (docs/results/asked.md).
WORTH_SHOWING = 0.03


class Carriers(NamedTuple):
    """The positions of the corpus that carry T predictions, in the order of predictions."""

    prediction: np.ndarray  # which prediction, int64 [u]
    # The global position of the state, int64 [u]; the next token is the predicted one.
    place: np.ndarray
    cosine: np.ndarray  # of that state to the prediction's, float32 [u]
    weight: np.ndarray  # its part of the prediction's evidence, float64 [u]
    tokens: np.ndarray  # the predicted tokens, int64 [T]
    unplaced: np.ndarray  # evidence of prototypes that no position carries, float64 [T]
    beside: np.ndarray  # positive evidence of residual and bias, float64 [T]
    # The largest cosine, −1 if there is none, NaN for a state of zero, float32 [T].
    nearest: np.ndarray

    def select(self, rows: Sequence[int]) -> Carriers:
        """Return the carriers of some predictions, renumbered."""
        chosen = np.asarray(rows, dtype=np.int64)
        bounds = np.searchsorted(self.prediction, np.arange(len(self.tokens) + 1))
        owner, offset = group_members(bounds[chosen + 1] - bounds[chosen])
        entries = bounds[chosen][owner] + offset
        columns = (column[entries] for column in self[1:4])
        return Carriers(owner, *columns, *(figures[chosen] for figures in self[4:]))


class ContextPrior:
    """r_t(d): domains, or else sources, and documents that carried the predictions so far."""

    def __init__(self, cells: Cells) -> None:
        column = "domain" if len(cells.keys("domain").names) > 1 else "source"
        self._domain, self._domain_rates = cells.keys(column).codes, cells.base_rates(column)
        self._document_rates = cells.document_rates
        self._domains = self._domain_rates.copy()
        # In units of the latest prediction: the unit grows, so that other amounts stay as they are.
        self._carried = np.zeros(len(self._document_rates))
        self._unit, self._total = 1.0, 0.0

    def ratios(self, documents: np.ndarray) -> np.ndarray:
        """Return r(d) of some documents, float64 [n]."""
        domain, base = self._domain[documents], CONCENTRATION * self._unit
        of_domain = (self._domains / self._domain_rates.clip(1e-300))[domain]
        of_document = self._carried[documents] / self._document_rates[documents]
        return (base * of_domain + of_document) / (base + self._total)

    def add(self, documents: np.ndarray, kernel: np.ndarray, parts: np.ndarray) -> None:
        """Add a prediction: documents of its positions, which may repeat, with their k_n and q."""
        rates = self._domain_rates
        if len(documents):
            sums = np.bincount(self._domain[documents], kernel, minlength=len(rates))
            likelihood = np.zeros_like(rates)
            np.divide(sums / kernel.sum(), rates, out=likelihood, where=rates > 0)
            self._domains *= STRAY + (1 - STRAY) * likelihood
            self._domains /= self._domains.sum()
        self._domains += (rates - self._domains) / SPAN
        self._unit *= 2 ** (1 / SPAN)
        np.add.at(self._carried, documents, parts * self._unit)
        self._total += float(parts.sum()) * self._unit
        if self._unit > MAX_UNIT:
            self._carried /= self._unit
            self._total /= self._unit
            self._unit = 1.0


def carriers_of(predictions: Predictions, lens: Lens, method: Method = "evidence") -> Carriers:
    """Return the positions that carry successive predictions of one text, by either method."""
    check_choice("the method", method, METHODS)
    if method == "source":
        return _contexts(predictions, lens)
    return spread(predictions, lens.cells, lens.head)


def spread(
    predictions: Predictions, cells: Cells, head: PrototypeHead, prior: ContextPrior | None = None
) -> Carriers:
    """Spread the evidence of successive predictions of one text over positions, as the module says.

    Of a cell and token with more than 512 positions, 512 represent all. ``prior`` holds the
    predictions before these, and these are added to it.
    """
    prior = ContextPrior(cells) if prior is None else prior
    uses, count, targets = predictions.uses(), len(predictions), predictions.targets.numpy()
    pairs = uses.prediction, uses.prototype, targets[uses.prediction]
    nearby = neighbours(cells, *pairs, predictions.states)
    prediction, repeats = uses.prediction[nearby.pair], nearby.sampling_weight
    kernel = repeats * np.exp((nearby.cosine.astype(np.float64) - 1) / TEMPERATURE)
    kernel[nearby.read == predictions.tokens.numpy()[prediction]] *= SAME_TOKEN
    document = cells.document_of(nearby.position)
    part, heaviest = np.zeros_like(kernel), [np.empty(0, dtype=np.int64)]
    bounds = np.searchsorted(prediction, np.arange(count + 1)).tolist()
    for begin, end in pairwise(bounds):
        weight = kernel[begin:end] * prior.ratios(document[begin:end])
        weight[weight <= MIN_WEIGHT_RATIO * weight.max(initial=0)] = 0
        weight /= max(weight.sum(), 1e-300)
        part[begin:end] = weight
        prior.add(document[begin:end], kernel[begin:end], weight)
        # Heavy by itself, not by how many positions of its range it represents.
        heaviest.append(begin + largest(weight / repeats[begin:end], HEAVIEST))
    heavy = np.concatenate(heaviest)
    states = cells.codes.states(cells.records(nearby.row[heavy]))
    shared = _relied_on(predictions, head, states, prediction[heavy])
    shared = shared[predictions.evidence > 0].numpy()
    # A position relies on the prototype of its own cell, however its state is coded.
    shared[nearby.pair[heavy]] = True
    evidence, unplaced = (
        np.bincount(uses.prediction[chosen], uses.weight[chosen], minlength=count)
        for chosen in (shared, ~shared)
    )
    nearest = nearest_of(nearby.cosine, prediction, count)
    nearest[~predictions.states.any(dim=1).numpy()] = np.nan
    positive = part > 0
    prediction = prediction[positive]
    return Carriers(
        prediction,
        nearby.position[positive],
        nearby.cosine[positive],
        part[positive] * evidence[prediction],
        targets,
        unplaced,
        predictions.other_evidence,
        nearest,
    )


def _relied_on(
    predictions: Predictions, head: PrototypeHead, states: Tensor, prediction: np.ndarray
) -> Tensor:
    """Return which prototypes the heaviest positions of each prediction rely on, bool [T, k]."""
    indices, prototypes = predictions.routing.indices, head.prototypes.detach()
    relied_on = torch.zeros(indices.shape, dtype=torch.bool)
    bounds = np.searchsorted(prediction, np.arange(len(predictions) + 1)).tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            used = prototypes[indices[number].to(prototypes.device)].cpu().float()
            used = functional.normalize(used, dim=-1)
            cosines = used @ predictions.states[number]
            fitted = head.weights == "fitted"
            threshold = FITTED_COSINE_RATIO * cosines if fitted else cosines.min()
            relied_on[number] = (states[begin:end] @ used.T).amax(0) >= threshold.clamp_min(0)
    return relied_on


def _contexts(predictions: Predictions, lens: Lens) -> Carriers:
    """Return the contexts of the prototypes in use: PRISM's A_t, α spread over them equally."""
    uses, count = predictions.uses("source"), len(predictions)
    first = lens.first_rows[uses.prototype]
    counts = lens.first_rows[uses.prototype + 1] - first
    use, context = group_members(counts)
    rows, empty = lens.index.take(first[use] + context), counts == 0
    return Carriers(
        uses.prediction[use],
        rows["position"].to_numpy(),
        rows["cosine"].to_numpy(),
        (uses.weight / np.maximum(counts, 1))[use],
        predictions.targets.numpy(),
        np.bincount(uses.prediction[empty], uses.weight[empty], minlength=count),
        np.zeros(count),
        np.full(count, np.nan, dtype=np.float32),
    )


class Share(NamedTuple):
    """One key, its share, and its share of all positions of the corpus, if that is known."""

    key: str
    share: float
    base_rate: float | None = None

    @property
    def lift(self) -> float | None:
        """How many times its base rate the share is."""
        return self.share / self.base_rate if self.base_rate else None

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"key", "share"}``; with ``base_rate`` and ``lift`` if they are known."""
        value = {"key": self.key, "share": self.share}
        known = {} if self.base_rate is None else {"base_rate": self.base_rate, "lift": self.lift}
        return value | known


@dataclass(frozen=True)
class Sources:
    """Shares by one column, largest first; items, ``elsewhere`` and ``unattributed`` sum to 1.

    ``items`` are the keys of text that matches the filter ``where``; other text is ``elsewhere``,
    and ``unattributed`` is the share that no training text carries.
    """

    by: str
    items: tuple[Share, ...]
    unattributed: float
    elsewhere: float = 0.0
    where: Conditions = ()
    method: Method = "evidence"

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"by", "items": [{"key", "share"}…], "unattributed"}``.

        With a filter, ``elsewhere`` and ``where`` too; ``method`` if it is not the default.
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
        """Return one row per key, and rows for the rest: shares sum to 1."""
        rest = [Share("elsewhere", self.elsewhere)] if self.elsewhere else []
        return frame(
            {self.by: item.key, "share": item.share, "base_rate": item.base_rate, "lift": item.lift}
            for item in (*self.items, *rest, Share("unattributed", self.unattributed))
        )

    def _repr_html_(self) -> str | None:
        return html_table(self)


@dataclass(frozen=True)
class Passage:
    """A span of a document that carries predictions, or a document with its heaviest position."""

    doc_id: str
    share: float  # of the passage, or of the whole document
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    # Of the marked token, as a global position of the corpus: the predicted token with the largest
    # weight, or the last token of a context by ``source``.
    position: int
    cosine: float = 0.0  # of the hidden state before the marked token to that of the prediction
    length: int = 1  # tokens from the first position to the last
    # If it opposes them, the predicted token that did not come next there.
    predicted: str | None = None
    probability: float | None = None  # the model's, of this token there
    lens: Lens | None = field(default=None, repr=False, compare=False)
    # Positions of further marked tokens.
    others: Sequence[int] | np.ndarray = field(default=(), repr=False, compare=False)

    @property
    def for_or_against(self) -> Literal["for", "against"]:
        """Whether it supports or opposes the predictions."""
        return "for" if self.predicted is None else "against"

    @cached_property
    def around(self) -> Around | None:
        """The sentence around the marked token; None if the text is not at hand."""
        return None if self.lens is None else self.lens.sentence(self.position)

    @property
    def text(self) -> str | None:
        """The same as one text."""
        return None if self.around is None else str(self.around)

    @cached_property
    def also(self) -> list[tuple[int, int]]:
        """Spans of ``text`` with further marked tokens; adjacent ones are joined."""
        return [] if self.lens is None else self.lens.spans_in_sentence(self.position, self.others)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        names = ("doc_id", "share", "source", "domain", "license", "title", "url", "text")
        value = {name: getattr(self, name) for name in (*names, "position", "cosine")} | {
            "token": None if self.around is None else self.around.token,
            "also": [list(span) for span in self.also],
            "for_or_against": self.for_or_against,
        }
        if self.predicted is not None:
            value |= {"predicted": self.predicted, "probability": self.probability}
        return value


def worth_showing(documents: Sequence[Passage]) -> list[Passage]:
    """Return the documents with at least 3 %, or, if the first has under 6 %, half of its share."""
    threshold = min(WORTH_SHOWING, documents[0].share / 2) if documents else 0.0
    return [document for document in documents if document.share >= threshold]


class Places(NamedTuple):
    """Positions that carry predictions, distinct and ascending."""

    place: np.ndarray  # global positions of hidden states, int64 [n]
    value: np.ndarray  # amounts, float64 [n]
    cosine: np.ndarray  # the largest to a prediction's state, float32 [n]


class Documents(NamedTuple):
    """Amounts by document, distinct and ascending."""

    number: np.ndarray  # rows of the table of documents, int64 [n]
    value: np.ndarray  # amounts, float64 [n]
    best: np.ndarray  # the index of each one's heaviest position, int64 [n]


@dataclass(frozen=True)
class Attribution:
    """What predictions rely on, by positions of the corpus."""

    lens: Lens
    places: Places
    rest: float  # the amount that no position carries
    coverage: Coverage | None = None  # None for a sum over many texts
    method: Method = "evidence"

    @property
    def total(self) -> float:
        """The amount that shares are relative to."""
        return float(self.places.value.sum()) + self.rest

    @property
    def support(self) -> Support | None:
        """How well the corpus supports the predictions; None if unknown, as for a state of zero."""
        scale, coverage = self.lens.support, self.coverage
        if coverage is None or scale is None or scale.nearest[0] == scale.nearest[-1]:
            return None
        known = len(coverage.tokens) and np.isfinite(coverage.nearest).all()
        return coverage.support() if known else None

    def sources(self, by: str = "source", where: Where | None = None) -> Sources:
        """Return shares by source, domain, license or document."""
        check_choice("the column that shares are by", by, COLUMNS)
        conditions, cells, total = normalised(where), self.lens.cells, self.total
        number, value, _ = self.by_document
        matching = cells.matching(conditions)[number] if conditions else np.ones(len(number), bool)
        if total <= 0:
            return Sources(by, (), 1.0, 0.0, conditions, self.method)
        elsewhere = float(value[~matching].sum()) / total
        number, value = number[matching], value[matching]
        if by == "document":
            names = cells.documents.take(number, ("doc_id",))["doc_id"].to_pylist()
            rates = cells.document_rates[number]
        else:
            names, codes = cells.keys(by)
            value, rates = np.bincount(codes[number], value, len(names)), cells.base_rates(by)
        # Contexts are not a sample of positions, so their shares have no base rate.
        has_rates = self.method == "evidence"
        items = tuple(
            Share(names[i], float(value[i] / total), float(rates[i]) if has_rates else None)
            for i in np.argsort(-value, kind="stable").tolist()
            if value[i] > 0
        )
        return Sources(by, items, self.rest / total, elsewhere, conditions, self.method)

    def documents(self, limit: int = 10, where: Where | None = None) -> list[Passage]:
        """Return the documents with the largest shares, each with its heaviest position."""
        number, value, best = self.by_document
        return [
            self._passage(int(best[i]), float(value[i] / self.total))
            for i in self._largest(value, number, limit, where)
        ]

    def passages(self, limit: int = 10, where: Where | None = None) -> list[Passage]:
        """Return the passages with the largest shares; positions near one another are one."""
        (place, value, _), number, total = self.places, self._numbers, self.total
        if not len(place):
            return []
        first = _first_positions(place, number)
        sums, end = np.add.reduceat(value, first), np.append(first[1:], len(place))
        passages: list[Passage] = []
        for i in self._largest(sums, number[first], limit, where):
            span = slice(int(first[i]), int(end[i]))
            best = span.start + int(value[span].argmax())
            marked = place[span][value[span] >= MARKED_WEIGHT_RATIO * value[best]] + 1
            length = int(place[span][-1] - place[span][0]) + 1
            passages.append(self._passage(best, float(sums[i] / total), length, marked))
        return passages

    def document_share(self, doc_id: str) -> float:
        """Return the share of one document; 0 for an unknown id."""
        matching = self.by_document.number == self.lens.cells.document_number(doc_id)
        amount = float(self.by_document.value[matching].sum())
        return amount / self.total if self.total > 0 else 0.0

    def _passage(
        self, index: int, share: float, length: int = 1, others: Sequence[int] | np.ndarray = ()
    ) -> Passage:
        """Return the passage that is marked at one of the positions."""
        return Passage(
            **self.lens.cells.facts(int(self._numbers[index])),
            share=share,
            position=int(self.places.place[index]) + (self.method == "evidence"),
            cosine=float(self.places.cosine[index]),
            length=length,
            lens=self.lens,
            others=others,
        )

    def _largest(
        self, value: np.ndarray, number: np.ndarray, limit: int, where: Where | None
    ) -> list[int]:
        """Return the indices of the largest amounts in documents that match a filter."""
        conditions = normalised(where)
        if conditions:
            value = np.where(self.lens.cells.matching(conditions)[number], value, 0)
        order = largest(value, limit)
        return order[value[order] > 0].tolist()

    @cached_property
    def by_document(self) -> Documents:
        """The amounts by document."""
        value, number = self.places.value, self._numbers
        first = np.flatnonzero(np.diff(number, prepend=-1))
        if not len(first):
            return Documents(number, value, number)
        sums, maxima = (f.reduceat(value, first) for f in (np.add, np.maximum))
        sizes = np.diff(np.append(first, len(number)))
        heaviest = np.flatnonzero(value == np.repeat(maxima, sizes))
        return Documents(number[first], sums, heaviest[np.searchsorted(heaviest, first)])

    @cached_property
    def _numbers(self) -> np.ndarray:
        return self.lens.cells.document_of(self.places.place)


def _first_positions(place: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return which of some positions, in documents of these numbers, begin a passage."""
    apart = np.zeros(len(place), dtype=bool)
    apart[1:] = (np.diff(place) > GAP) | (np.diff(number) > 0)
    runs = np.append(0, np.flatnonzero(apart))
    piece = (place - place[runs[np.cumsum(apart)]]) // MAX_PASSAGE
    apart[1:] |= np.diff(piece) != 0
    return np.append(0, np.flatnonzero(apart))


def added_up(place: np.ndarray, value: np.ndarray, cosine: np.ndarray) -> Places:
    """Return positions with the sums of their values and the largest of their cosines."""
    # Positions come as ascending ranges, which a stable sort merges.
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
    coverage, information = None, np.ones(len(tokens))
    if method == "evidence":
        information = token_information(lens.cells.token_rates[tokens], len(lens.cells))
        near = cosine >= (1 if lens.support is None else lens.support.median)
        documents = lens.cells.document_of(place[near])
        pairs = np.stack([prediction[near], documents], axis=1)
        coverage = Coverage(tokens, information, nearest, pairs)
    places = added_up(place, value * information[prediction], cosine)
    return Attribution(lens, places, float((unplaced + beside) @ information), coverage, method)


def joined(parts: Sequence[Attribution]) -> Attribution:
    """Return the attribution of successive predictions from parts, of one lens."""
    columns = (np.concatenate(column) for column in zip(*(p.places for p in parts), strict=True))
    coverages = [part.coverage for part in parts if part.coverage is not None]
    coverage = Coverage.joined(coverages) if coverages else None
    rest = sum(part.rest for part in parts)
    return Attribution(parts[0].lens, added_up(*columns), rest, coverage)


class AttributionSum:
    """The sum over many texts; each document is represented by one position, its heaviest."""

    def __init__(self, lens: Lens) -> None:
        self._lens, self._rest = lens, 0.0
        self._value, self._weight = np.zeros((2, len(lens.cells.starts)))
        self._place = np.full(len(self._value), -1, dtype=np.int64)

    def add(self, attribution: Attribution) -> None:
        """Add the attribution of another text."""
        (number, value, best), places = attribution.by_document, attribution.places
        self._add(number, value, places.value[best], places.place[best], attribution.rest)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the sum over the documents that are in it, for :meth:`add_arrays`."""
        number = np.flatnonzero(self._place >= 0)
        columns = {"value": self._value, "weight": self._weight, "place": self._place}
        columns = {name: column[number] for name, column in columns.items()}
        return {"number": number, "rest": np.array(self._rest), **columns}

    def add_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add another sum of the same lens."""
        self._add(*(arrays[name] for name in ("number", "value", "weight", "place", "rest")))

    def _add(self, number: Any, value: Any, weight: Any, place: Any, rest: Any) -> None:
        self._rest += float(rest)
        self._value[number] += value
        heavier = weight > self._weight[number]
        self._weight[number[heavier]] = weight[heavier]
        self._place[number[heavier]] = place[heavier]

    def result(self) -> Attribution:
        """Return the attribution of all texts so far."""
        rows = np.flatnonzero(self._place >= 0)
        places = Places(self._place[rows], self._value[rows], np.zeros(len(rows), np.float32))
        return Attribution(self._lens, places, self._rest)
