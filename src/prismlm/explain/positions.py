"""Evidence by position: the training text in which the predicted token came next, and how near.

The output layer of a trained model is, up to its regularisation λ, a sum over its training
positions n (representer theorem, Yeh et al. 2018, with next tokens y_n and hidden states z_n):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n·z / λ

So the text that speaks for y at a state z is where y came next and the state was near. Prototypes
say where to look: cell i holds the positions whose nearest prototype is i. With e⁺_i the positive
evidence of prototype i for y, a position n of the cells of those prototypes with y_n = y weighs

    a_n = e⁺_c(n) exp((cos(z, z_n) − 1) / T)

and the evidence of the prototypes that have such positions is spread over all of them in
proportion. The evidence of the others, of residual and of bias is unattributed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.shares import numbers_of_ranges
from prismlm.index.cells import Cells

TEMPERATURE = 0.1
# Of one cell and next token, at most so many positions are compared, evenly spaced over the range.
MOST_OF_A_RANGE = 512


class Supports(NamedTuple):
    """The positions that carry some predictions, in the order of predictions.

    Attributes:
        prediction: which one, int64 [u].
        place: the global position of the state, int64 [u]; the next token is the predicted one.
        cosine: of that state to the prediction's, float32 [u].
        weight: its part of the prediction's positive evidence, float64 [u].
        unplaced: evidence of prototypes without such positions, of each prediction, float64 [T].
    """

    prediction: np.ndarray
    place: np.ndarray
    cosine: np.ndarray
    weight: np.ndarray
    unplaced: np.ndarray


def supports(table: EvidenceTable, cells: Cells) -> Supports:
    """Return the positions behind every prediction of a table; see the module for the equation.

    Of a range with more than 512 positions, 512 evenly spaced ones stand for all.
    """
    uses, count = table.uses("evidence"), len(table.states)
    first, last = cells.ranges(uses.prototype, table.targets.numpy()[uses.position])
    sizes = last - first
    placed = sizes > 0
    evidence = np.bincount(uses.position[placed], uses.weight[placed], minlength=count)
    unplaced = np.bincount(uses.position[~placed], uses.weight[~placed], minlength=count)
    rows, use, multiplicity = _rows(first[placed], sizes[placed])
    prediction = uses.position[placed][use]
    place, cosine = _compare(cells, rows, prediction, table.states)
    weight = uses.weight[placed][use] * multiplicity
    weight *= np.exp((cosine.astype(np.float64) - 1) / TEMPERATURE)
    total = np.bincount(prediction, weight, minlength=count)
    scale = np.divide(evidence, total, out=np.zeros(count), where=total > 0)
    return Supports(prediction, place, cosine, weight * scale[prediction], unplaced)


def _rows(first: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows to compare, the range of each, and how many rows each stands for."""
    kept = np.minimum(sizes, MOST_OF_A_RANGE)
    offset, owner = numbers_of_ranges(np.zeros_like(kept), kept)
    step = sizes / np.maximum(kept, 1)
    rows = first[owner] + ((offset + 0.5) * step[owner]).astype(np.int64)
    return rows, owner, step[owner]


def _compare(
    cells: Cells, rows: np.ndarray, prediction: np.ndarray, states: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each row, and the cosine of its state to that of its prediction."""
    places = np.empty(len(rows), dtype=np.int64)
    cosines = np.empty(len(rows), dtype=np.float32)
    bounds = np.searchsorted(prediction, np.arange(len(states) + 1)).tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            records = cells.records(rows[begin:end])
            places[begin:end] = records["position"]
            cosines[begin:end] = cells.cosines(records, states[number])
    return places, cosines
