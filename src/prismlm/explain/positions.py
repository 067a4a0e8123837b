"""Evidence by position: the training text in which the predicted token came next, and how near.

The output layer of a trained model is, up to its regularisation λ, a sum over its training
positions n (representer theorem, Yeh et al. 2018, with next tokens y_n and hidden states z_n):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n·z / λ

So the text that speaks for y at a state z is where y came next and the state was near. Prototypes
say where to look: cell i holds the positions whose nearest prototype is i. Of the cells of the
prototypes with positive evidence e⁺_i for y, each position n with y_n = y has the weight

    w_n = k_n · r_t(d_n)        k_n = exp((cos(z, z_n) − 1) / T) · (B if x_n = x else 1)

with the tokens x_n and x that were read last. That is of the input: what a step on position n moves
in the embedding of x_n, predictions after another token do not read. The other weights of the
network are in none of the two factors.

and evidence is spread over all of them together in proportion: by prototype, a cell with one poor
position would give it everything. Over them goes the evidence of the prototypes that one of the
four heaviest positions relies on, too: is at least as near to as the prediction is to the last of
its own k; or, where these k are not the nearest, as with fitted weights, nine tenths as near as the
prediction is. Where a text was learned these are most of them, and fewer where it was not. The
evidence of the others, of residual and of bias is unattributed.

The factor r is the text before. A text keeps to its matter: a domain, and in it a document, that
carried the predictions before is likelier to carry this one than its size alone would make it.

Domains are the states of a hidden Markov model. With π(g) a domain's share of all positions, a text
is of domain g with probability p_t(g), at first π(g). A prediction is of the text's domain or, with
probability ρ, of any; the positions of domain g in it say how likely it is there, and the text
turns to a domain drawn from π once in h predictions:

    L_t(g) = Σ_{n of g} k_n / (π(g) Σ_n k_n)
    p_{t+1}(g) = (1 − 1/h) p_t(g) (ρ + (1 − ρ) L_t(g)) / Z_t + π(g) / h

(Rabiner 1989, the forward pass.) Documents are too many and too small for a model of states: with
q_s(d) the part of an earlier prediction s that fell on document d, π(d) its share of all positions,

    A(d) = Σ_{s<t} 2^{−(t−1−s)/h} q_s(d)            A = Σ_d A(d)
    r_t(d) = (C p_t(g) / π(g) + A(d) / π(d)) / (C + A)        d a document of domain g

which is the mean of a Dirichlet posterior about the domains, divided by the document's share. The
first prediction of a text has r = 1. Nothing looks ahead: what carries a prediction is the same
however the text goes on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prismlm.explain.evidence import EvidenceTable
from prismlm.layers import PrototypeHead
from prismlm.lens.cells import Cells
from prismlm.lens.neighbours import largest, nearest_of, neighbours

TEMPERATURE = 0.3
# B: a position after the same token counts so many times.
SAME_TOKEN = 10.0
# ρ, and C and h in predictions.
STRAY = 0.9
CONCENTRATION = 1000.0
SPAN = 6.0
# What one of so many positions relies on has text behind it.
HEAVIEST = 4
# What relies on a prototype that was pursued has so much of the cosine that the prediction has.
ALIKE = 0.9
# Positions with less than this part of the weight of a prediction's heaviest are left out.
LEAST = 1e-6
LARGEST_UNIT = 1e100


class Supports(NamedTuple):
    """The positions that carry some predictions, in the order of predictions.

    Attributes:
        prediction: which one, int64 [u].
        place: the global position of the state, int64 [u]; the next token is the predicted one.
        cosine: of that state to the prediction's, float32 [u].
        weight: its part of the prediction's positive evidence, float64 [u].
        unplaced: evidence without a place, of each prediction, float64 [T].
        nearest: the largest cosine of each prediction, −1 where there is none, float32 [T].
    """

    prediction: np.ndarray
    place: np.ndarray
    cosine: np.ndarray
    weight: np.ndarray
    unplaced: np.ndarray
    nearest: np.ndarray


class DocumentsSoFar:
    """Which domains and documents carried the predictions of a text so far; see the module.

    Where documents have no domains, or all the same, their sources stand for them. ρ is ``stray``,
    C ``concentration`` and h ``span``.
    """

    def __init__(
        self,
        cells: Cells,
        stray: float = STRAY,
        concentration: float = CONCENTRATION,
        span: float = SPAN,
    ) -> None:
        column = "domain" if len(cells.keys("domain").names) > 1 else "source"
        self._domain, self._domain_rates = cells.keys(column).codes, cells.base_rates(column)
        self._document_rates = cells.document_rates
        self._stray, self._concentration, self._span = stray, concentration, span
        self._domains = self._domain_rates.copy()
        # Amounts of documents are in units of the latest prediction: the unit grows, so that what
        # is not met stays as it is.
        self._carried = np.zeros(len(self._document_rates))
        self._unit, self._total = 1.0, 0.0

    def ratios(self, documents: np.ndarray) -> np.ndarray:
        """Return r(d) of some documents, float64 [n]."""
        domain, base = self._domain[documents], self._concentration * self._unit
        of_domain = self._domains[domain] / self._domain_rates[domain]
        of_document = self._carried[documents] / self._document_rates[documents]
        return (base * of_domain + of_document) / (base + self._total)

    def add(self, documents: np.ndarray, near: np.ndarray, parts: np.ndarray) -> None:
        """Add a prediction: of each of its positions the document, which may repeat, k_n and q."""
        rates = self._domain_rates
        if len(documents):
            share = np.bincount(self._domain[documents], near, minlength=len(rates)) / near.sum()
            likelihood = np.divide(share, rates, out=np.zeros_like(rates), where=rates > 0)
            self._domains *= self._stray + (1 - self._stray) * likelihood
            self._domains /= self._domains.sum()
        self._domains += (rates - self._domains) / self._span
        self._unit *= 2 ** (1 / self._span)
        np.add.at(self._carried, documents, parts * self._unit)
        self._total += float(parts.sum()) * self._unit
        if self._unit > LARGEST_UNIT:
            self._carried /= self._unit
            self._total /= self._unit
            self._unit = 1.0


def supports(
    table: EvidenceTable,
    cells: Cells,
    head: PrototypeHead,
    so_far: DocumentsSoFar | None = None,
    *,
    temperature: float = TEMPERATURE,
    same_token: float = SAME_TOKEN,
) -> Supports:
    """Return the positions behind every prediction of a table; see the module for the equation.

    Of a cell and token with more than 512 positions, 512 stand for all. What has less than a
    millionth of the heaviest position's weight is left out.

    The table is of successive predictions of one text; ``so_far`` is what carried those before
    them, to which these are added. T is ``temperature`` and B ``same_token``.
    """
    so_far = DocumentsSoFar(cells) if so_far is None else so_far
    uses, count = table.uses("evidence"), len(table.states)
    tokens = table.targets.numpy()[uses.position]
    found = neighbours(cells, uses.position, uses.prototype, tokens, table.states)
    prediction = uses.position[found.pair]
    weight = found.stands_for * np.exp((found.cosine.astype(np.float64) - 1) / temperature)
    weight[found.read == table.read.numpy()[prediction]] *= same_token
    document = cells.document_of(found.place)
    kept = np.zeros(len(weight), dtype=bool)
    heaviest: list[np.ndarray] = []
    bounds = np.searchsorted(prediction, np.arange(count + 1)).tolist()
    for begin, end in pairwise(bounds):
        kept[begin:end] = _with_text_before(weight[begin:end], document[begin:end], so_far)
        if begin < end:
            # Each by itself, not by how many of its range it stands for.
            each = weight[begin:end] / found.stands_for[begin:end]
            heaviest.append(begin + largest(each, HEAVIEST))
    named = np.concatenate([np.empty(0, dtype=np.int64), *heaviest])
    states = cells.codes.states(cells.records(found.row[named]))
    shared = _relied_on(table, head, states, prediction[named])[table.positive > 0].numpy()
    # A position relies on the prototype of its own cell, however its state is coded.
    shared[found.pair[named]] = True
    evidence, unplaced = (
        np.bincount(uses.position[some], uses.weight[some], minlength=count)
        for some in (shared, ~shared)
    )
    nearest = nearest_of(found.cosine, prediction, count)
    prediction, place, cosine, part = (
        column[kept] for column in (prediction, found.place, found.cosine, weight)
    )
    return Supports(prediction, place, cosine, part * evidence[prediction], unplaced, nearest)


def _with_text_before(
    weight: np.ndarray, document: np.ndarray, so_far: DocumentsSoFar
) -> np.ndarray:
    """Turn one prediction's weights into its parts, in place, and return which of them count."""
    near = weight.copy()
    weight *= so_far.ratios(document)
    kept = weight > LEAST * weight.max(initial=0)
    weight[~kept] = 0
    if len(weight):
        weight /= weight.sum()
    so_far.add(document, near, weight)
    return kept


def _relied_on(
    table: EvidenceTable, head: PrototypeHead, states: Tensor, prediction: np.ndarray
) -> Tensor:
    """Return which prototypes of each prediction a state that is named for it relies on, too.

    States are unit vectors, float32 [n, d], and ``prediction`` int64 [n] ascends; bool [T, k].
    """
    found = torch.zeros(table.indices.shape, dtype=torch.bool)
    prototypes, bounds = head.prototypes.detach(), np.arange(len(found) + 1)
    for number, (begin, end) in enumerate(pairwise(np.searchsorted(prediction, bounds).tolist())):
        if begin < end:
            used = prototypes[table.indices[number].to(prototypes.device)].cpu().float()
            used = functional.normalize(used, dim=-1)
            near = used @ table.states[number]
            least = ALIKE * near if head.weights == "fitted" else near.min()
            found[number] = (states[begin:end] @ used.T).amax(0) >= least.clamp_min(0)
    return found


def supports_of(table: EvidenceTable, cells: Cells, head: PrototypeHead) -> Supports:
    """Return the positions behind some predictions of a text; the whole text is looked for once."""
    whole, rows = table.within or (table, None)
    if cells not in whole.kept:
        whole.kept[cells] = supports(whole, cells, head)
    found: Supports = whole.kept[cells]
    if rows is None:
        return found
    number = np.full(len(whole.states), -1)
    number[rows] = np.arange(len(rows))
    prediction = number[found.prediction]
    kept = np.flatnonzero(prediction >= 0)
    kept = kept[np.argsort(prediction[kept], kind="stable")]
    return Supports(
        prediction[kept],
        found.place[kept],
        found.cosine[kept],
        found.weight[kept],
        found.unplaced[rows],
        found.nearest[rows],
    )
