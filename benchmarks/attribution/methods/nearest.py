"""Nearest states: the largest cosine of a passage's positions to the state that predicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.attribution.judges.passages import Prediction
from benchmarks.attribution.methods.setting import ROWS_AT_ONCE, Setting


class NearestStates:
    """The largest cosine over a passage's positions, whatever token stands after them.

    Args:
        setting: whose positions are read.
        same_token: keep to positions that have the predicted token after them; others give 0.
    """

    def __init__(self, setting: Setting, *, same_token: bool = False) -> None:
        self.setting, self.same_token = setting, same_token

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        positions, asked = self.setting.positions, self.setting.ask(predictions)
        shape = (len(predictions), len(self.setting.bank))
        scores = np.zeros(shape, dtype=np.float32)
        if not self.same_token:
            # A passage of a single token has no position: it keeps the least cosine there is.
            scores -= 1
            for first in range(0, len(positions), ROWS_AT_ONCE):
                rows = slice(first, first + ROWS_AT_ONCE)
                cosines = asked.states @ positions.state[rows].astype(np.float32).T
                passage = positions.passage[rows]
                edges = np.flatnonzero(np.diff(passage, prepend=-1))
                found = np.maximum.reduceat(cosines, edges, axis=1)
                at = passage[edges]
                scores[:, at] = np.maximum(scores[:, at], found)
            return scores
        for row, (state, target) in enumerate(
            zip(asked.states, asked.targets.tolist(), strict=True)
        ):
            rows = positions.by_token[target]
            cosines = positions.state[rows].astype(np.float32) @ state
            np.maximum.at(scores[row], positions.passage[rows], cosines)
        return scores
