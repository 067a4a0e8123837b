"""From prototypes to training text: which positions, documents and sources carry predictions.

Prototypes say where to look: cell i holds the positions whose nearest prototype is i. In the cells
of the prototypes with positive evidence e⁺_i for the token y, each position n with y_n = y has

    w_n = k_n · r_t(d_n)        k_n = exp((cos(z, z_n) − 1) / T) · (B if x_n = x else 1)

with the tokens x_n and x that were read last and the context prior r (:class:`ContextPrior`). The
positive evidence is spread over all these positions together in proportion to w_n; by prototype, a
cell with one poor position would give it everything. The evidence of a prototype is spread only if
one of the four heaviest positions relies on the prototype too: it is at least as near to it as the
prediction is to the last of its own k, or, with fitted weights, nine tenths as near as the
prediction is. The evidence of the other prototypes, of the residual and of the bias is
unattributed. docs/concepts.md derives this from the representer theorem (Yeh et al. 2018).

A prediction of the token y counts by the information of y, with p(y) the share of positions after
which y came next, so that names count, and "the" hardly does. With a_n the evidence on position n,
shares of documents, sources, domains and licences s are

    w_t = ε + max(0, −ln p(y_t) − c)²
    share(s) = Σ_n∈s w_t a_n / Σ_t w_t (Σ_i e⁺_ti + e⁺_residual + e⁺_bias)

The method ``source`` is PRISM's A_t instead: with μ uniform over the stored contexts S_i,

    A_t = Σ_i α_ti μ_{S_i},   share(s) = Σ_t A_t(s) / Σ_t Σ_i α_ti
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from prismlm.layers import PrototypeHead
from prismlm.lens.cells import (
    Cells,
    Conditions,
    Where,
    group_members,
    largest,
    neighbours,
    normalised,
)
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.lens.lens import Around, Lens

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
# c in nats, and ε. This c and the square ranked the document that holds an answer first most often,
# on questions to a model that half knew its texts (docs/results/asked.md).
COMMON, MIN_WEIGHT = 5.0, 0.01
# docs/results/asked.md has the error rates, on questions that these bounds were not chosen on.
STRONG, NONE = 0.8, 0.25
MIN_INFORMATION = 1.0
# What a question is about is looked for in so many documents, the best.
ASKED_OF = 8
Level = Literal["strong", "weak", "none"]
LEVELS: tuple[Level, ...] = get_args(Level)
WORDS: dict[Level, str] = {
    "strong": "one document of this corpus holds nearly all that the answer tells",
    "weak": "this corpus holds only parts of what the answer tells",
    "none": "no document of this corpus holds what the answer tells",
}
OFF_SUBJECT: dict[Level, str] = {
    "weak": "the document that holds most of the answer names nothing of the question",
    "none": "the documents that hold parts of the answer name nothing of the question",
}


class Carriers(NamedTuple):
    """The positions of the corpus that carry T predictions, in the order of predictions."""

    prediction: np.ndarray  # which prediction, int64 [u]
    # The global position of the state, int64 [u]; the next token is the predicted one.
    place: np.ndarray
    cosine: np.ndarray  # of that state to the prediction's, float32 [u]
    weight: np.ndarray  # its part of the prediction's evidence, float64 [u]
    tokens: np.ndarray  # the predicted tokens, int64 [T]
    rest: np.ndarray  # evidence that no position carries, float64 [T]
    zero: np.ndarray  # whether the prediction's state is zero, so that nothing is near, bool [T]

    def select(self, rows: Sequence[int]) -> Carriers:
        """Return the carriers of some predictions, renumbered."""
        chosen = np.asarray(rows, dtype=np.int64)
        bounds = np.searchsorted(self.prediction, np.arange(len(self.tokens) + 1))
        owner, offset = group_members(bounds[chosen + 1] - bounds[chosen])
        entries = bounds[chosen][owner] + offset
        columns = (column[entries] for column in self[1:4])
        return Carriers(owner, *columns, *(figures[chosen] for figures in self[4:]))


class ContextPrior:
    """r_t(d): domains, or else sources, and documents that carried the predictions so far.

    A text is of domain g with probability p_t(g), at first its share π(g) of all positions. Domains
    are the states of a hidden Markov model (Rabiner 1989, the forward pass); documents are counted,
    with q_s(d) the part of an earlier prediction s that fell on document d of domain g:

        L_t(g) = Σ_{n of g} k_n / (π(g) Σ_n k_n)
        p_{t+1}(g) = (1 − 1/h) p_t(g) (ρ + (1 − ρ) L_t(g)) / Z_t + π(g) / h
        A(d) = Σ_{s<t} 2^{−(t−1−s)/h} q_s(d)            A = Σ_d A(d)
        r_t(d) = (C p_t(g) / π(g) + A(d) / π(d)) / (C + A)
    """

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
    count, targets = len(predictions), predictions.targets.numpy()
    query, prototype, of_use = predictions.uses(predictions.evidence)
    nearby = neighbours(cells, query, prototype, targets[query], predictions.states)
    prediction, repeats = query[nearby.pair], nearby.sampling_weight
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
    evidence, uncovered = (
        np.bincount(query[chosen], of_use[chosen], minlength=count) for chosen in (shared, ~shared)
    )
    residual, bias = predictions.parts.residual_evidence, predictions.parts.bias_evidence
    other = residual.double().clamp_min(0) + bias.double().clamp_min(0)
    positive = part > 0
    prediction = prediction[positive]
    return Carriers(
        prediction,
        nearby.position[positive],
        nearby.cosine[positive],
        part[positive] * evidence[prediction],
        targets,
        uncovered + other.numpy(),
        ~predictions.states.any(dim=1).numpy(),
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
    prediction, prototype, weight = predictions.uses(predictions.routing.activations)
    first, count = lens.first_rows[prototype], len(predictions)
    counts = lens.first_rows[prototype + 1] - first
    use, context = group_members(counts)
    rows, empty = lens.index.take(first[use] + context), counts == 0
    return Carriers(
        prediction[use],
        rows["position"].to_numpy(),
        rows["cosine"].to_numpy(),
        (weight / np.maximum(counts, 1))[use],
        predictions.targets.numpy(),
        np.bincount(prediction[empty], weight[empty], minlength=count),
        np.zeros(count, dtype=bool),
    )


class Share(NamedTuple):
    """One key, its share, and its share of all positions of the corpus, if that is known."""

    key: str
    share: float
    base_rate: float | None = None
    traced: float = 1.0  # the part of all evidence that has a key

    @property
    def expected(self) -> float | None:
        """The share that it would have if what is traced were spread evenly over the corpus."""
        return self.base_rate and self.base_rate * self.traced

    @property
    def lift(self) -> float | None:
        """How many times the expected share the share is."""
        return self.share / self.expected if self.expected else None

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"key", "share"}``; with ``base_rate`` and ``lift`` if they are known."""
        value = {"key": self.key, "share": self.share}
        known = {"base_rate": self.base_rate, "lift": self.lift}
        return value if self.base_rate is None else value | known


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
    # The part of the answer's information that it carries (:class:`Coverage`); None if unknown.
    carried: float | None = None
    # Positions of further marked tokens.
    others: Sequence[int] | np.ndarray = field(default=(), repr=False, compare=False)

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
        names = ("doc_id", "share", "carried", "source", "domain", "license", "title", "url")
        value = {name: getattr(self, name) for name in (*names, "text", "position", "cosine")} | {
            "token": None if self.around is None else self.around.token,
            "also": [list(span) for span in self.also],
            "for_or_against": "for" if self.predicted is None else "against",
        }
        if self.predicted is not None:
            value |= {"predicted": self.predicted, "probability": self.probability}
        return value


class Places(NamedTuple):
    """Positions that carry predictions, distinct and ascending."""

    place: np.ndarray  # global positions of hidden states, int64 [n]
    value: np.ndarray  # amounts, float64 [n]
    cosine: np.ndarray  # the largest to a prediction's state, float32 [n]


class Support(NamedTuple):
    """The support of an answer."""

    level: Level  # strong from 0.8 on, none below 0.25; one lower if ``off_subject``
    score: float  # s, the largest part of the answer's information that one document carries
    off_subject: bool = False  # whether documents count less that name nothing of the question

    @property
    def sentence(self) -> str:
        """The level as a sentence."""
        word = "No" if self.level == "none" else self.level.capitalize()
        return f"{word} support: {(OFF_SUBJECT if self.off_subject else WORDS)[self.level]}."

    @property
    def sums(self) -> dict[str, float]:
        """The level, as a count of one, and the score: to be summed over texts."""
        return {self.level: 1, "score": self.score}


class Coverage(NamedTuple):
    """Which documents carry which of T predictions, and with that the support of an answer.

    A document carries a prediction if one of its positions came before the same token, in a state
    at least as near as the nearest of half the predictions of unseen text, a figure of
    :mod:`prismlm.lens.support`. Each distinct token y of the answer counts once, and support is the
    largest part of the answer's information that one document carries:

        s = max_d  Σ_{y carried by d} w(y) / Σ_y w(y)

    Many documents that share a word each are not about the answer; one document that has its names
    and terms together is. An answer of common words alone, with Σ_y w(y) < 1, has nothing that a
    document could hold, and is weak.

    A model that does not know what it is asked about may answer from a document about something
    else. In a chat, the level of a document that has no telling word of the question is one lower.
    """

    tokens: np.ndarray  # the predicted tokens, int64 [T]
    weights: np.ndarray  # w of each, float64 [T]
    carried: np.ndarray  # (prediction, document, position), int64 [m, 3]

    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Return w of each distinct token, float64 [n], and each prediction's number of these."""
        tokens, number = np.unique(self.tokens, return_inverse=True)
        weight = np.zeros(len(tokens))
        weight[number] = self.weights
        return weight, number

    def parts(self, groups: np.ndarray, count: int) -> np.ndarray:
        """Return the part of Σ_y w(y) that each group carries, given the group of each pair."""
        weight, number = self.distinct()
        pairs = np.unique(groups * len(weight) + number[self.carried[:, 0]])
        sums = np.bincount(pairs // len(weight), weight[pairs % len(weight)], minlength=count)
        return sums / weight.sum()

    def by_document(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return documents, int [m], the part of Σ_y w(y) that each carries, and Σ_y w(y)."""
        documents, owner = np.unique(self.carried[:, 1], return_inverse=True)
        return documents, self.parts(owner, len(documents)), float(self.distinct()[0].sum())

    def support(self, about: Callable[[int], float] | None = None) -> Support:
        """Return the support of the predictions; ``about``: what a document names of a question."""
        documents, shares, information = self.by_document()
        score = float(shares.max(initial=0))
        if information < MIN_INFORMATION or score < NONE:
            return Support("weak" if information < MIN_INFORMATION else "none", score)
        bound = STRONG if score >= STRONG else NONE
        best = [int(documents[i]) for i in largest(shares, ASKED_OF) if shares[i] >= bound]
        off_subject = about is not None and not any(map(about, best))
        return Support(LEVELS[(bound == NONE) + off_subject], score, off_subject)


def token_information(rates: np.ndarray, positions: int) -> np.ndarray:
    """Return w of tokens with these rates; one that never comes next counts as half a position."""
    nats = np.maximum(0.0, -np.log(np.maximum(rates, 0.5 / positions)) - COMMON)
    return MIN_WEIGHT + nats**2


def support_counts(sums: Mapping[str, float]) -> dict[str, Any] | None:
    """Return how many texts have each level, and their mean score, from summed ``Support.sums``."""
    levels = {level: int(sums[level]) for level in LEVELS}
    texts = sum(levels.values())
    return {"levels": levels, "score": sums["score"] / texts} if texts else None


class Groups(NamedTuple):
    """Groups of successive positions: documents, or passages."""

    number: np.ndarray  # the document of each, a row of the table of documents, int64 [n]
    value: np.ndarray  # amounts, float64 [n]
    best: np.ndarray  # the index of each one's heaviest position, int64 [n]
    first: np.ndarray  # the index of each one's first position, int64 [n]


@dataclass(frozen=True)
class Attribution:
    """What predictions rely on, by positions of the corpus."""

    lens: Lens
    places: Places
    rest: float  # the amount that no position carries
    coverage: Coverage | None = None  # None for a sum over many texts, and with a state of zero
    method: Method = "evidence"

    @property
    def total(self) -> float:
        """The amount that shares are relative to."""
        return float(self.places.value.sum()) + self.rest

    @property
    def traced(self) -> float:
        """The share of the evidence that the corpus carries; 0 without evidence."""
        return 1 - self.rest / self.total if self.total > 0 else 0.0

    def support(self, about: Callable[[int], float] | None = None) -> Support | None:
        """Return how well the corpus supports the predictions; None if unknown: a state of zero.

        ``about``: what part of a question a document names.
        """
        scale, coverage = self.lens.support, self.coverage
        if coverage is None or scale is None or scale.nearest[0] == scale.nearest[-1]:
            return None
        return coverage.support(about) if len(coverage.tokens) else None

    def sources(self, by: str = "source", where: Where | None = None) -> Sources:
        """Return shares by source, domain, license or document."""
        check_choice("the column that shares are by", by, COLUMNS)
        conditions, cells, total = normalised(where), self.lens.cells, self.total
        number, value = self.by_document[:2]
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
        has_rates, traced = self.method == "evidence", self.traced
        items = tuple(
            Share(names[i], float(value[i] / total), float(rates[i]) if has_rates else None, traced)
            for i in np.argsort(-value, kind="stable").tolist()
            if value[i] > 0
        )
        return Sources(by, items, self.rest / total, elsewhere, conditions, self.method)

    def documents(self, limit: int = 10, where: Where | None = None) -> list[Passage]:
        """Return the documents with the largest shares, each with its heaviest position."""
        return self._largest(self.by_document, limit, where)

    def passages(self, limit: int = 10, where: Where | None = None) -> list[Passage]:
        """Return the passages with the largest shares; positions near one another are one."""
        if not len(place := self.places.place):
            return []
        apart = np.append(True, (np.diff(place) > GAP) | (np.diff(self._numbers) > 0))
        piece = (place - place[np.flatnonzero(apart)[np.cumsum(apart) - 1]]) // MAX_PASSAGE
        groups = self._grouped(apart | (np.diff(piece, prepend=0) != 0))
        return self._largest(groups, limit, where, np.append(groups.first[1:], len(place)))

    def document_share(self, doc_id: str) -> float:
        """Return the share of one document; 0 for an unknown id."""
        matching = self.by_document.number == self.lens.cells.document_number(doc_id)
        amount = float(self.by_document.value[matching].sum())
        return amount / self.total if self.total > 0 else 0.0

    def _largest(
        self, groups: Groups, limit: int, where: Where | None, end: np.ndarray | None = None
    ) -> list[Passage]:
        """Return the largest of documents, or of passages up to the positions ``end``."""
        (place, value, cosine), conditions = self.places, normalised(where)
        amounts, total, result = groups.value, self.total, list[Passage]()
        if conditions:
            amounts = np.where(self.lens.cells.matching(conditions)[groups.number], amounts, 0)
        carried = self._carried(groups)
        for i in largest(amounts, limit).tolist():
            if amounts[i] <= 0:
                break
            best, length, others = int(groups.best[i]), 1, ()
            if end is not None:
                span = slice(int(groups.first[i]), int(end[i]))
                others = place[span][value[span] >= MARKED_WEIGHT_RATIO * value[best]] + 1
                length = int(place[span][-1] - place[span][0]) + 1
            passage = Passage(
                **self.lens.cells.facts(int(groups.number[i])),
                share=float(amounts[i] / total),
                position=int(place[best]) + (self.method == "evidence"),
                cosine=float(cosine[best]),
                length=length,
                carried=None if carried is None else float(carried[i]),
                lens=self.lens,
                others=others,
            )
            result.append(passage)
        return result

    def _carried(self, groups: Groups) -> np.ndarray | None:
        """Return the part of the answer's information that each group carries."""
        coverage = self.coverage
        if coverage is None or len(np.unique(coverage.tokens)) < 2:
            return None
        begins = self.places.place[groups.first]
        group = np.searchsorted(begins, coverage.carried[:, 2], side="right") - 1
        return coverage.parts(group, len(begins))

    @cached_property
    def by_document(self) -> Groups:
        """The amounts by document."""
        return self._grouped(np.diff(self._numbers, prepend=-1) != 0)

    def _grouped(self, begins: np.ndarray) -> Groups:
        """Return groups by which positions begin one, bool [positions]."""
        value, first = self.places.value, np.flatnonzero(begins)
        if not len(first):
            return Groups(first, value, first, first)
        sums, maxima = (f.reduceat(value, first) for f in (np.add, np.maximum))
        heaviest = np.flatnonzero(value == maxima[np.cumsum(begins) - 1])
        best = heaviest[np.searchsorted(heaviest, first)]
        return Groups(self._numbers[first], sums, best, first)

    @cached_property
    def _numbers(self) -> np.ndarray:
        return self.lens.cells.document_of(self.places.place)


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
    prediction, place, cosine, value, tokens, rest, zero = carriers
    coverage, information = None, np.ones(len(tokens))
    if method == "evidence":
        information = token_information(lens.cells.token_rates[tokens], len(lens.cells))
        near = cosine >= (1 if lens.support is None else lens.support.median)
        documents = lens.cells.document_of(place[near])
        carried = np.stack([prediction[near], documents, place[near]], axis=1)
        coverage = None if zero.any() else Coverage(tokens, information, carried)
    places = added_up(place, value * information[prediction], cosine)
    return Attribution(lens, places, float(rest @ information), coverage, method)


def joined(parts: Sequence[Attribution]) -> Attribution:
    """Return the attribution of successive predictions from parts, of one lens."""
    columns = (np.concatenate(column) for column in zip(*(p.places for p in parts), strict=True))
    coverages, count = list[Coverage](), 0
    for coverage in (part.coverage for part in parts if part.coverage is not None):
        coverages.append(coverage._replace(carried=coverage.carried + np.array([count, 0, 0])))
        count += len(coverage.tokens)
    whole = Coverage(*map(np.concatenate, zip(*coverages, strict=True))) if coverages else None
    coverage = whole if len(coverages) == len(parts) else None
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
        number, value, best, _ = attribution.by_document
        place, weight, _ = attribution.places
        self.add_amounts(number, value, weight[best], place[best], attribution.rest)

    def add_amounts(
        self,
        number: np.ndarray,
        value: np.ndarray,
        weight: np.ndarray,
        place: np.ndarray,
        rest: Any,
    ) -> None:
        """Add amounts of distinct documents, the weights and places of their heaviest positions."""
        self._rest += float(rest)
        self._value[number] += value
        heavier = weight > self._weight[number]
        self._weight[number[heavier]] = weight[heavier]
        self._place[number[heavier]] = place[heavier]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what :meth:`add_amounts` of another sum takes."""
        number = np.flatnonzero(self._place >= 0)
        columns = {"value": self._value, "weight": self._weight, "place": self._place}
        columns = {name: column[number] for name, column in columns.items()}
        return {"number": number, "rest": np.array(self._rest), **columns}

    def result(self) -> Attribution:
        """Return the attribution of all texts so far."""
        rows = np.flatnonzero(self._place >= 0)
        places = Places(self._place[rows], self._value[rows], np.zeros(len(rows), np.float32))
        return Attribution(self._lens, places, self._rest)
