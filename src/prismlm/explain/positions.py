"""Evidence by position: the training text in which the predicted token came next, and how near.

The output layer of a trained model is, up to its regularisation λ, a sum over its training
positions n (representer theorem, Yeh et al. 2018, with next tokens y_n and hidden states z_n):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n·z / λ

So the text that speaks for y at a state z is where y came next and the state was near. Prototypes
say where to look: cell i holds the positions whose nearest prototype is i. Of the cells of the
prototypes with positive evidence e⁺_i for y, each position n with y_n = y has the weight

    w_n = exp((cos(z, z_n) − 1) / T)

and the evidence of the prototypes that have such positions is spread over all of them together in
proportion: by prototype, a cell with one poor position would give it everything. The evidence of
the other prototypes, of residual and of bias is unattributed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prismlm.explain.evidence import EvidenceTable
from prismlm.index.cells import Cells
from prismlm.index.neighbours import nearest_of, neighbours

TEMPERATURE = 0.05
# Positions with less than this part of the weight of a prediction's heaviest are left out.
LEAST = 1e-6


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


def supports(table: EvidenceTable, cells: Cells, temperature: float = TEMPERATURE) -> Supports:
    """Return the positions behind every prediction of a table; see the module for the equation.

    Of a cell and token with more than 512 positions, 512 stand for all. What has less than a
    millionth of the heaviest position's weight is left out.

    Args:
        table: of the predictions.
        cells: of a lens.
        temperature: T; what is smaller keeps to the nearest.
    """
    uses, count = table.uses("evidence"), len(table.states)
    tokens = table.targets.numpy()[uses.position]
    found = neighbours(cells, uses.position, uses.prototype, tokens, table.states)
    prediction = uses.position[found.pair]
    placed = np.zeros(len(uses.position), dtype=bool)
    placed[found.pair] = True
    evidence = np.bincount(uses.position[placed], uses.weight[placed], minlength=count)
    unplaced = np.bincount(uses.position[~placed], uses.weight[~placed], minlength=count)
    weight = found.stands_for * np.exp((found.cosine.astype(np.float64) - 1) / temperature)
    heaviest = np.zeros(count)
    np.maximum.at(heaviest, prediction, weight)
    kept = weight > LEAST * heaviest[prediction]
    prediction, place, cosine, weight = (
        column[kept] for column in (prediction, found.place, found.cosine, weight)
    )
    total = np.bincount(prediction, weight, minlength=count)
    scale = np.divide(evidence, total, out=np.zeros(count), where=total > 0)
    return Supports(
        prediction,
        place,
        cosine,
        weight * scale[prediction],
        unplaced,
        nearest_of(cosine, prediction, count),
    )
