"""Evidence by position, by brute force over every position in memory: the reference.

The output layer at its optimum under weight decay λ is a sum over training positions (representer
theorem, Yeh et al. 2018):

    logit_y(z) = Σ_n (1[y_n = y] − p_n(y)) z_n · z / λ

A position n thus speaks for y at state z where y stands after it, the more the nearer z_n is to z
and the less the model already knew. Taken as a kernel that can be made narrower than a product,
and kept to the cells (positions by nearest prototype) of the prototypes with positive evidence:

    weight_n = 1[y_n = y] · exp((cos(A z, A z_n) − 1) / T) · (1 − p_n)^δ · (B if x_n = x else 1)
    signed:    (1[y_n = y] − p_n(y)) · exp((cos(A z, A z_n) − 1) / T)

A passage's score is the sum over its positions. What is free is in :class:`Choices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from benchmarks.attribution.judges.passages import Prediction
from benchmarks.attribution.methods.setting import Asked, Positions, Setting


@dataclass(frozen=True)
class Choices:
    """What the equation leaves open.

    Attributes:
        temperature: T; 0.02 takes little but the nearest, 0.5 nearly all that has the token.
        doubt: δ, how much less a position counts that the model was sure of.
        cells: of how many prototypes with positive evidence; None for every position, whatever
            its cell.
        order: which of them come first: those with the most ``evidence`` or the ``nearest``.
        spread: ``jointly`` weighs positions of all cells alike; ``weighed`` multiplies by the
            evidence e⁺ of the cell's prototype; ``by_prototype`` hands each prototype's e⁺ out
            among the positions of its cell, so that a full cell counts no more than a small one.
        whitening: A = M^(−whitening / 2) of the second moment M of unit states; 0 for none, 1 for
            all of it.
        signed: whether positions with other next tokens count against, as the theorem has it.
        same_token: B, how many times a position counts whose token is the last before the
            prediction.
    """

    temperature: float = 0.1
    doubt: float = 0.0
    cells: int | None = 16
    order: Literal["evidence", "nearest"] = "evidence"
    spread: Literal["jointly", "weighed", "by_prototype"] = "jointly"
    whitening: float = 0.0
    signed: bool = False
    same_token: float = 1.0


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
        rows, weight = self.weights(asked, row)
        passages = self.setting.positions.passage[rows]
        total = np.bincount(passages, weight, minlength=len(self.setting.bank))
        return total.astype(np.float32)

    def weights(self, asked: Asked, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions that count for a prediction, and their weights, float64."""
        positions, choices = self.setting.positions, self.choices
        target = int(asked.targets[row])
        carriers, evidence = carrying(asked, row, choices)
        if choices.signed:
            rows = self._in_cells(carriers)
        else:
            rows = positions.by_token[target]
            if carriers is not None:
                rows = rows[np.isin(positions.cell[rows], carriers)]
        near = np.exp((self._cosines(asked.states[row], rows) - 1) / choices.temperature)
        weight = near.astype(np.float64)
        weight[positions.read[rows] == asked.read[row]] *= choices.same_token
        if choices.signed:
            weight *= (positions.token[rows] == target) - self._probability(rows, target)
        elif choices.doubt:
            weight *= (1.0 - positions.probability[rows]) ** choices.doubt
        if carriers is None or choices.spread == "jointly":
            return rows, weight
        return rows, self._by_carrier(rows, weight, carriers, evidence)

    def _in_cells(self, carriers: np.ndarray | None) -> np.ndarray:
        positions = self.setting.positions
        if carriers is None:
            return np.arange(len(positions))
        return np.concatenate([positions.by_cell[cell] for cell in carriers.tolist()])

    def _by_carrier(
        self, rows: np.ndarray, weight: np.ndarray, carriers: np.ndarray, evidence: np.ndarray
    ) -> np.ndarray:
        order = np.argsort(carriers)
        cell = self.setting.positions.cell[rows]
        carrier = order[np.searchsorted(carriers[order], cell)]
        factor = evidence.astype(np.float64)
        if self.choices.spread == "by_prototype":
            total = np.bincount(carrier, np.abs(weight), minlength=len(carriers))
            factor = np.divide(factor, total, out=np.zeros_like(factor), where=total > 0)
        return weight * factor[carrier]

    def _cosines(self, state: np.ndarray, rows: np.ndarray) -> np.ndarray:
        states = self.setting.positions.state[rows].astype(np.float32)
        if not self.choices.whitening:
            return states @ state
        matrix = whitener(self.setting.positions, self.choices.whitening)
        states, asked = states @ matrix, state @ matrix
        return states @ (asked / np.linalg.norm(asked)) / np.linalg.norm(states, axis=1)

    def _probability(self, rows: np.ndarray, token: int) -> np.ndarray:
        """Return the probability of one token at these positions, from states as they are kept."""
        positions = self.setting.positions
        weight = self.setting.weight()[token].numpy()
        logits = positions.state[rows].astype(np.float32) @ weight * positions.size[rows]
        return np.exp(logits - positions.log_total[rows])


def carrying(asked: Asked, row: int, choices: Choices) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the prototypes whose cells are read, and their positive evidence."""
    if choices.cells is None:
        return None, np.empty(0)
    evidence = asked.evidence[row]
    # Prototypes are in the order of their cosines.
    order = np.arange(len(evidence))
    if choices.order == "evidence":
        order = np.argsort(-evidence, kind="stable")
    order = order[evidence[order] > 0][: choices.cells]
    return asked.prototypes[row][order], evidence[order]


@lru_cache(maxsize=8)
def whitener(positions: Positions, power: float) -> np.ndarray:
    """Return M^(−power / 2), float32 [d, d]; directions that hardly occur are held at 1e-6."""
    values, vectors = np.linalg.eigh(positions.second_moment)
    values = np.maximum(values, 1e-6 * values.max())
    return ((vectors * values ** (-power / 2)) @ vectors.T).astype(np.float32)
