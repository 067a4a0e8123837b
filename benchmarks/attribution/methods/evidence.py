"""Evidence by position, by brute force over every position in memory: the reference.

The output layer at its optimum under weight decay λ is a sum over training positions (representer
theorem, Yeh et al. 2018):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n · z / λ

So a position n speaks for y at state z if y comes next there, the more the nearer z_n is to z and
the less the model already knew. As a kernel that can be narrower than a product, over the cells
(positions by nearest prototype) of the prototypes with positive evidence:

    weight_n = 1[y_n = y] · exp((cos(z, z_n) − 1) / T)
    signed:    (1[y_n = y] − p_n(y)) · exp((cos(z, z_n) − 1) / T)

A passage's score is the sum over its positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.attribution.judges.passages import Prediction
from benchmarks.attribution.methods.setting import Asked, Setting


@dataclass(frozen=True)
class Choices:
    """Design choices that the derivation does not fix.

    Attributes:
        temperature: T; 0.02 takes little but the nearest, 0.5 nearly all with the token.
        cells: number of prototypes, those with the most positive evidence, whose cells are read;
            None for every position.
        signed: whether positions with other next tokens count against, as in the theorem.
    """

    temperature: float = 0.1
    cells: int | None = 16
    signed: bool = False


class EvidenceByPosition:
    """The method with these choices."""

    def __init__(self, setting: Setting, choices: Choices) -> None:
        self.setting, self.choices = setting, choices

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        asked = self.setting.ask(predictions)
        return np.stack([self.scores(asked, row) for row in range(len(predictions))])

    def scores(self, asked: Asked, row: int) -> np.ndarray:
        """Return the scores of one prediction, float32 [passages]."""
        positions, choices = self.setting.positions, self.choices
        target = int(asked.targets[row])
        cells = carriers(asked, row, choices.cells)
        if choices.signed:
            assert cells is not None
            rows = np.flatnonzero(np.isin(positions.cell, cells))
        else:
            rows = positions.by_token[target]
            if cells is not None:
                rows = rows[np.isin(positions.cell[rows], cells)]
        cosines = positions.state[rows].astype(np.float32) @ asked.states[row]
        weight = np.exp((cosines - 1) / choices.temperature).astype(np.float64)
        if choices.signed:
            weight *= (positions.token[rows] == target) - self._probability(rows, target)
        total = np.bincount(positions.passage[rows], weight, minlength=len(self.setting.bank))
        return total.astype(np.float32)

    def _probability(self, rows: np.ndarray, token: int) -> np.ndarray:
        """Return the probability of one token at these positions, from their stored states."""
        positions = self.setting.positions
        weight = self.setting.weight()[token].numpy()
        logits = positions.state[rows].astype(np.float32) @ weight * positions.size[rows]
        return np.exp(logits - positions.log_total[rows])


def carriers(asked: Asked, row: int, count: int | None) -> np.ndarray | None:
    """Return the prototypes whose cells are read; None for all positions."""
    if count is None:
        return None
    evidence = asked.evidence[row]
    order = np.argsort(-evidence, kind="stable")
    return asked.prototypes[row][order[evidence[order] > 0][:count]]
