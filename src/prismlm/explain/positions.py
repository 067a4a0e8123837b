"""Evidence by position: the training text in which the predicted token came next, and how near.

The output layer of a trained model is, up to its regularisation λ, a sum over its training
positions n (representer theorem, Yeh et al. 2018, with next tokens y_n and hidden states z_n):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n·z / λ

So the text that speaks for y at a state z is where y came next and the state was near. Prototypes
say where to look: cell i holds the positions whose nearest prototype is i. Of the cells of the
prototypes with positive evidence e⁺_i for y, each position n with y_n = y has the weight

    w_n = exp((cos(z, z_n) − 1) / T) · r_t(d_n)

and the evidence of the prototypes that have such positions is spread over all of them together in
proportion: by prototype, a cell with one poor position would give it everything. The evidence of
the other prototypes, of residual and of bias is unattributed.

The factor r is the text before. A text keeps to its matter: a domain, and in it a document, that
carried the predictions before is likelier to carry this one than its size alone would make it.
With q_s(d) the part of an earlier prediction s that fell on document d, q_s(g) on its domain g,
π(d) and π(g) their shares of all positions, and a half-life of h predictions,

    A(·) = Σ_{s<t} 2^{−(t−1−s)/h} q_s(·)            A = Σ_d A(d)
    r_t(g) = (C_g + A(g) / π(g)) / (C_g + A)
    r_t(d) = (C_d r_t(g) + A(d) / π(d)) / (C_d + A)

which is the mean of a two-level Dirichlet posterior (as in Teh et al. 2006) over domains and their
documents, divided by their shares, each prediction counted by its responsibilities, the older the
less. The first prediction of a text has r = 1. Nothing looks ahead: what carries a prediction is
the same however the text goes on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from prismlm.explain.evidence import EvidenceTable
from prismlm.index.cells import Cells
from prismlm.index.neighbours import nearest_of, neighbours

TEMPERATURE = 0.1
# C_g, C_d and h, in predictions.
CONCENTRATIONS = (10.0, 1000.0)
HALF_LIFE = 32.0
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
        unplaced: evidence of prototypes without such positions, of each prediction, float64 [T].
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

    Where documents have no domains, or all the same, their sources stand for them.

    Args:
        cells: whose documents.
        concentrations: C_g and C_d; the smaller, the more a few predictions decide.
        half_life: h.
    """

    def __init__(
        self,
        cells: Cells,
        concentrations: tuple[float, float] = CONCENTRATIONS,
        half_life: float = HALF_LIFE,
    ) -> None:
        column = "domain" if len(cells.keys("domain").names) > 1 else "source"
        self._groups = cells.keys(column).codes
        self._rates = cells.base_rates(column), cells.document_rates
        self._carried = tuple(np.zeros(len(rates)) for rates in self._rates)
        self._concentrations, self._growth = concentrations, 2 ** (1 / half_life)
        # All amounts are in units of the latest prediction: the unit grows, so that the amounts of
        # what is not met stay as they are.
        self._unit, self._total = 1.0, 0.0

    def ratios(self, documents: np.ndarray) -> np.ndarray:
        """Return r(d) of some documents, float64 [n]."""
        found = np.ones(len(documents))
        levels = (self._groups[documents], documents)
        columns = zip(levels, self._rates, self._carried, self._concentrations, strict=True)
        for members, rates, carried, concentration in columns:
            base = concentration * self._unit
            found = (base * found + carried[members] / rates[members]) / (base + self._total)
        return found

    def add(self, documents: np.ndarray, parts: np.ndarray) -> None:
        """Add a prediction: the parts of it that fell on documents, which may repeat."""
        self._unit *= self._growth
        levels = (self._groups[documents], documents)
        for members, carried in zip(levels, self._carried, strict=True):
            np.add.at(carried, members, parts * self._unit)
        self._total += float(parts.sum()) * self._unit
        if self._unit > LARGEST_UNIT:
            for carried in self._carried:
                carried /= self._unit
            self._total /= self._unit
            self._unit = 1.0


def supports(
    table: EvidenceTable,
    cells: Cells,
    so_far: DocumentsSoFar | None = None,
    *,
    temperature: float = TEMPERATURE,
) -> Supports:
    """Return the positions behind every prediction of a table; see the module for the equation.

    Of a cell and token with more than 512 positions, 512 stand for all. What has less than a
    millionth of the heaviest position's weight is left out.

    Args:
        table: of successive predictions of one text.
        cells: of a lens.
        so_far: what carried the predictions of the text before these, which are added to it; a
            text begins with the first of the table if left out.
        temperature: T; what is smaller keeps to the nearest.
    """
    so_far = DocumentsSoFar(cells) if so_far is None else so_far
    uses, count = table.uses("evidence"), len(table.states)
    tokens = table.targets.numpy()[uses.position]
    found = neighbours(cells, uses.position, uses.prototype, tokens, table.states)
    prediction = uses.position[found.pair]
    placed = np.zeros(len(uses.position), dtype=bool)
    placed[found.pair] = True
    evidence = np.bincount(uses.position[placed], uses.weight[placed], minlength=count)
    unplaced = np.bincount(uses.position[~placed], uses.weight[~placed], minlength=count)
    weight = found.stands_for * np.exp((found.cosine.astype(np.float64) - 1) / temperature)
    document = cells.document_of(found.place)
    kept = np.zeros(len(weight), dtype=bool)
    bounds = np.searchsorted(prediction, np.arange(count + 1)).tolist()
    for begin, end in pairwise(bounds):
        kept[begin:end] = _with_text_before(weight[begin:end], document[begin:end], so_far)
    nearest = nearest_of(found.cosine, prediction, count)
    prediction, place, cosine, part = (
        column[kept] for column in (prediction, found.place, found.cosine, weight)
    )
    return Supports(prediction, place, cosine, part * evidence[prediction], unplaced, nearest)


def _with_text_before(
    weight: np.ndarray, document: np.ndarray, so_far: DocumentsSoFar
) -> np.ndarray:
    """Turn one prediction's weights into its parts, in place, and return which of them count."""
    weight *= so_far.ratios(document)
    kept = weight > LEAST * weight.max(initial=0)
    weight /= weight[kept].sum()
    so_far.add(document[kept], weight[kept])
    return kept


def supports_of(table: EvidenceTable, cells: Cells) -> Supports:
    """Return the positions behind some predictions of a text; the whole text is looked for once."""
    whole, rows = table.within or (table, None)
    if cells not in whole.kept:
        whole.kept[cells] = supports(whole, cells)
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
