"""Controls: passages at random, and passages at random among those that have the token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.methods.setting import Setting


class AtRandom:
    """Every passage's score is drawn between 0 and 1, anew for each prediction."""

    def __init__(self, bank: PassageBank, seed: int = 0) -> None:
        self.bank, self.generator = bank, np.random.default_rng(seed)

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        return self.generator.random((len(predictions), len(self.bank)), dtype=np.float32)


class SameToken:
    """Passages in which the predicted token stands: what the words alone say.

    Args:
        setting: whose positions are read.
        counted: score by how often it stands there; else between 0 and 1 at random if it does.
        seed: of the draw.
    """

    def __init__(self, setting: Setting, *, counted: bool, seed: int = 0) -> None:
        self.setting, self.counted = setting, counted
        self.generator = np.random.default_rng(seed)

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        positions, passages = self.setting.positions, len(self.setting.bank)
        scores = np.zeros((len(predictions), passages), dtype=np.float32)
        for row, prediction in zip(scores, predictions, strict=True):
            found = positions.passage[positions.by_token[prediction.target]]
            count = np.bincount(found, minlength=passages)
            drawn = self.generator.random(passages, dtype=np.float32)
            row[:] = count if self.counted else np.where(count > 0, drawn, 0)
        return scores
