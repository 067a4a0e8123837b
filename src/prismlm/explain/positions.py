"""Evidence by position: the training text in which the predicted token came next, and how near.

The output layer of a trained model is, up to its regularisation λ, a sum over its training
positions n (representer theorem, Yeh et al. 2018, with next tokens y_n and hidden states z_n):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n·z / λ

So the text that supports y at a state z is where y came next and the state was near. Prototypes
say where to look: cell i holds the positions whose nearest prototype is i. In the cells of the
prototypes with positive evidence e⁺_i for y, each position n with y_n = y has the weight

    w_n = k_n · r_t(d_n)        k_n = exp((cos(z, z_n) − 1) / T) · (B if x_n = x else 1)

with the tokens x_n and x that were read last: what a training step on position n moves in the
embedding of x_n is not read by predictions after another token. The positive evidence is spread
over all these positions together in proportion to w_n; by prototype, a cell with one poor position
would give it everything. Spread is the evidence of prototypes that one of the four heaviest
positions relies on too: it is at least as near to them as the prediction is to the last of its own
k, or, with fitted weights, nine tenths as near as the prediction is. The evidence of the other
prototypes, of the residual and of the bias is unattributed.

The factor r is a context prior: texts stay on topic, so a domain, and in it a document, that
carried the predictions before is likelier to carry this one than its size alone suggests.

Domains are the states of a hidden Markov model (Rabiner 1989, the forward pass). With π(g) a
domain's share of all positions, a text is of domain g with probability p_t(g), at first π(g). A
prediction is of the text's domain or, with probability ρ, of any; the positions of domain g in it
say how likely it is there, and the text turns to a domain drawn from π once in h predictions:

    L_t(g) = Σ_{n of g} k_n / (π(g) Σ_n k_n)
    p_{t+1}(g) = (1 − 1/h) p_t(g) (ρ + (1 − ρ) L_t(g)) / Z_t + π(g) / h

Documents are too many and too small for a model of states: with q_s(d) the part of an earlier
prediction s that fell on document d, π(d) its share of all positions,

    A(d) = Σ_{s<t} 2^{−(t−1−s)/h} q_s(d)            A = Σ_d A(d)
    r_t(d) = (C p_t(g) / π(g) + A(d) / π(d)) / (C + A)        d a document of domain g

which is the mean of a Dirichlet posterior about the domains, divided by the document's share. The
first prediction of a text has r = 1. Nothing looks ahead: what carries a prediction is the same
whatever follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prismlm.errors import check_choice
from prismlm.explain.prediction import Predictions
from prismlm.layers import PrototypeHead
from prismlm.lens.cells import Cells, group_members, largest, nearest_of, neighbours
from prismlm.lens.lens import Lens

Method = Literal["evidence", "source"]
METHODS: tuple[str, ...] = get_args(Method)
TEMPERATURE = 0.3
# B: a position after the same token counts so many times.
SAME_TOKEN = 10.0
# ρ, and C and h in predictions.
STRAY = 0.9
CONCENTRATION = 1000.0
SPAN = 6.0
# Evidence is spread where one of so many heaviest positions relies on the prototype too.
HEAVIEST = 4
# With fitted weights, "relies on" is this part of the prediction's own cosine.
ALIKE = 0.9
# Positions below this part of the heaviest weight are left out.
LEAST = 1e-6
LARGEST_UNIT = 1e100


class Carriers(NamedTuple):
    """The positions of the corpus that carry T predictions, in the order of predictions.

    Attributes:
        prediction: which prediction, int64 [u].
        place: the global position of the state, int64 [u]; the next token is the predicted one.
        cosine: of that state to the prediction's, float32 [u].
        weight: its part of the prediction's evidence, float64 [u].
        tokens: the predicted tokens, int64 [T].
        unplaced: evidence of prototypes that no position carries, float64 [T].
        beside: positive evidence of residual and bias, float64 [T].
        nearest: the largest cosine, −1 where there is none, NaN for a state of zero, float32 [T].
    """

    prediction: np.ndarray
    place: np.ndarray
    cosine: np.ndarray
    weight: np.ndarray
    tokens: np.ndarray
    unplaced: np.ndarray
    beside: np.ndarray
    nearest: np.ndarray

    def of(self, rows: Sequence[int]) -> Carriers:
        """Return the carriers of some predictions, numbered anew."""
        chosen = np.asarray(rows, dtype=np.int64)
        bounds = np.searchsorted(self.prediction, np.arange(len(self.tokens) + 1))
        owner, within = group_members(bounds[chosen + 1] - bounds[chosen])
        kept = bounds[chosen][owner] + within
        columns = (column[kept] for column in self[1:4])
        return Carriers(owner, *columns, *(figures[chosen] for figures in self[4:]))


class ContextPrior:
    """Which domains and documents carried the predictions of a text so far: r of the module.

    Where documents have no domains, or all the same, their sources take their place.
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
        # Amounts of documents are in units of the latest prediction: the unit grows, so that all
        # other amounts stay as they are.
        self._carried = np.zeros(len(self._document_rates))
        self._unit, self._total = 1.0, 0.0

    def ratios(self, documents: np.ndarray) -> np.ndarray:
        """Return r(d) of some documents, float64 [n]."""
        domain, base = self._domain[documents], self._concentration * self._unit
        of_domain = (self._domains / self._domain_rates.clip(1e-300))[domain]
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


def carriers_of(
    predictions: Predictions,
    lens: Lens,
    method: Method = "evidence",
    prior: ContextPrior | None = None,
) -> Carriers:
    """Return the positions that carry successive predictions of one text, by either method."""
    check_choice("the method", method, METHODS)
    if method == "source":
        return _contexts(predictions, lens)
    return spread(predictions, lens.cells, lens.head, prior)


def spread(
    predictions: Predictions,
    cells: Cells,
    head: PrototypeHead,
    prior: ContextPrior | None = None,
    *,
    temperature: float = TEMPERATURE,
    same_token: float = SAME_TOKEN,
) -> Carriers:
    """Spread the evidence of successive predictions of one text; see the module for the equation.

    Of a cell and token with more than 512 positions, 512 represent all. Positions with less than a
    millionth of the heaviest weight are left out. ``prior`` knows the predictions before these,
    which are added to it.
    """
    prior = ContextPrior(cells) if prior is None else prior
    uses, count, targets = predictions.uses(), len(predictions), predictions.targets.numpy()
    asked = uses.prediction, uses.prototype, targets[uses.prediction]
    found = neighbours(cells, *asked, predictions.states)
    prediction = uses.prediction[found.pair]
    near = found.sampling_weight * np.exp((found.cosine.astype(np.float64) - 1) / temperature)
    near[found.read == predictions.read.numpy()[prediction]] *= same_token
    document = cells.document_of(found.position)
    part, heaviest = np.zeros_like(near), [np.empty(0, dtype=np.int64)]
    bounds = np.searchsorted(prediction, np.arange(count + 1)).tolist()
    for begin, end in pairwise(bounds):
        own, k = document[begin:end], near[begin:end]
        weight = k * prior.ratios(own)
        weight[weight <= LEAST * weight.max(initial=0)] = 0
        weight /= max(weight.sum(), 1e-300)
        part[begin:end] = weight
        prior.add(own, k, weight)
        # Each position by itself, not by how many of its range it represents.
        heaviest.append(begin + largest(weight / found.sampling_weight[begin:end], HEAVIEST))
    named = np.concatenate(heaviest)
    states = cells.codes.states(cells.records(found.row[named]))
    shared = _relied_on(predictions, head, states, prediction[named])
    shared = shared[predictions.evidence > 0].numpy()
    # A position relies on the prototype of its own cell, however its state is coded.
    shared[found.pair[named]] = True
    evidence, unplaced = (
        np.bincount(uses.prediction[some], uses.weight[some], minlength=count)
        for some in (shared, ~shared)
    )
    nearest = nearest_of(found.cosine, prediction, count)
    nearest[~predictions.states.any(dim=1).numpy()] = np.nan
    kept = part > 0
    prediction, weight = prediction[kept], part[kept]
    return Carriers(
        prediction,
        found.position[kept],
        found.cosine[kept],
        weight * evidence[prediction],
        targets,
        unplaced,
        predictions.beside,
        nearest,
    )


def _relied_on(
    predictions: Predictions, head: PrototypeHead, states: Tensor, prediction: np.ndarray
) -> Tensor:
    """Return which prototypes of each prediction one of its heaviest positions relies on, too.

    States are unit vectors, float32 [n, d], and ``prediction`` int64 [n] ascends; bool [T, k].
    """
    indices, prototypes = predictions.routing.indices, head.prototypes.detach()
    relied_on = torch.zeros(indices.shape, dtype=torch.bool)
    bounds = np.searchsorted(prediction, np.arange(len(predictions) + 1)).tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            used = prototypes[indices[number].to(prototypes.device)].cpu().float()
            used = functional.normalize(used, dim=-1)
            own = used @ predictions.states[number]
            least = ALIKE * own if head.weights == "fitted" else own.min()
            relied_on[number] = (states[begin:end] @ used.T).amax(0) >= least.clamp_min(0)
    return relied_on


def _contexts(predictions: Predictions, lens: Lens) -> Carriers:
    """Return the contexts of the prototypes in use: PRISM's A_t, α spread over them equally."""
    uses, count = predictions.uses("source"), len(predictions)
    first = lens.first_rows[uses.prototype]
    counts = lens.first_rows[uses.prototype + 1] - first
    use, context = group_members(counts)
    rows, none = lens.index.take(first[use] + context), counts == 0
    return Carriers(
        uses.prediction[use],
        rows["position"].to_numpy(),
        rows["cosine"].to_numpy(),
        (uses.weight / np.maximum(counts, 1))[use],
        predictions.targets.numpy(),
        np.bincount(uses.prediction[none], uses.weight[none], minlength=count),
        np.zeros(count),
        np.full(count, np.nan, dtype=np.float32),
    )
