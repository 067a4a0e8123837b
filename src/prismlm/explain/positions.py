"""Evidence by position: the training text in which the predicted token came next, and how near.

The output layer of a trained model is, up to its regularisation λ, a sum over its training
positions n (representer theorem, Yeh et al. 2018, with next tokens y_n and hidden states z_n):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n·z / λ

So the text that speaks for y at a state z is where y came next and the state was near. Prototypes
say where to look: cell i holds the positions whose nearest prototype is i. Of the cells of the
prototypes with positive evidence e⁺_i for y, each position n with y_n = y has the weight

    w_n = exp((cos(z, z_n) − 1) / T) · π_t(d_n) / π_0(d_n)

and the evidence of the prototypes that have such positions is spread over all of them together in
proportion: by prototype, a cell with one poor position would give it everything. The evidence of
the other prototypes, of residual and of bias is unattributed.

The second factor is the text before. A text keeps to its matter, so a document d that carried the
predictions before is likelier to carry this one than its length alone would make it. With q_s(d)
the part of prediction s that fell on d, C a number of predictions and h a half-life,

    π_t(d) = (C π_0(d) + Σ_{s<t} 2^{−(t−1−s)/h} q_s(d)) / (C + Σ_{s<t} 2^{−(t−1−s)/h})

with π_0(d) the share of d in all positions: the mean of a Dirichlet posterior of concentration C
over documents, each prediction counted by its responsibilities, the older the less. The first
prediction of a text has π = π_0. Nothing looks ahead: what carries a prediction is the same
however the text goes on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from prismlm.explain.evidence import EvidenceTable
from prismlm.index.cells import Cells
from prismlm.index.neighbours import nearest_of, neighbours

TEMPERATURE = 0.1
# C and h, in predictions.
CONCENTRATION = 3.0
HALF_LIFE = 16.0
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
    """How much of the predictions of a text so far each document carried; the older the less.

    Args:
        cells: whose documents.
    """

    def __init__(self, cells: Cells) -> None:
        self._rates = cells.document_rates
        self._carried = np.zeros(len(self._rates))
        # All amounts are in units of the latest prediction: the unit grows, so that the amounts of
        # documents that are not met stay as they are.
        self._unit, self._total = 1.0, 0.0

    def ratios(self, documents: np.ndarray) -> np.ndarray:
        """Return π(d) / π_0(d) of some documents, float64 [n]."""
        carried = self._carried[documents] / self._rates[documents]
        base = CONCENTRATION * self._unit
        return (base + carried) / (base + self._total)

    def add(self, documents: np.ndarray, parts: np.ndarray) -> None:
        """Add a prediction: the parts of it that fell on documents, which may repeat."""
        self._unit *= 2 ** (1 / HALF_LIFE)
        np.add.at(self._carried, documents, parts * self._unit)
        self._total += float(parts.sum()) * self._unit
        if self._unit > LARGEST_UNIT:
            self._carried /= self._unit
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
    columns = (column[kept] for column in (found.place, found.cosine, found.weight))
    return Supports(prediction[kept], *columns, found.unplaced[rows], found.nearest[rows])
