"""Baselines and controls: passages at random, by the token, by nearest states, by their words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.methods.setting import ROWS_AT_ONCE, Setting
from benchmarks.attribution.retrieval import BM25


class AtRandom:
    """Every passage's score is drawn between 0 and 1, anew for each prediction."""

    def __init__(self, bank: PassageBank, seed: int = 0) -> None:
        self.bank, self.generator = bank, np.random.default_rng(seed)

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        return self.generator.random((len(predictions), len(self.bank)), dtype=np.float32)


class SameToken:
    """Passages with the predicted token: scored by its count, or at random if not ``counted``."""

    def __init__(self, setting: Setting, *, counted: bool, seed: int = 0) -> None:
        self.setting, self.counted = setting, counted
        self.generator = np.random.default_rng(seed)

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        positions, passages = self.setting.positions, len(self.setting.bank)
        scores = np.zeros((len(predictions), passages), dtype=np.float32)
        for row, prediction in zip(scores, predictions, strict=True):
            matches = positions.passage[positions.by_token[prediction.target]]
            count = np.bincount(matches, minlength=passages)
            drawn = self.generator.random(passages, dtype=np.float32)
            row[:] = count if self.counted else np.where(count > 0, drawn, 0)
        return scores


class NearestStates:
    """The largest cosine over a passage's positions, whatever token comes next.

    With ``same_token`` only positions before the predicted token count; other passages get 0.
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


class ByWords:
    """BM25 of passages for the text and the predicted token, or for its last tokens."""

    def __init__(self, bank: PassageBank, last: int | None = None) -> None:
        self.last = last
        self.tokenizer = bank.corpus.tokenizer
        self.bm25 = BM25([bank.text(passage) for passage in range(len(bank))])

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        texts = [
            str(self.tokenizer.decode([*asked.ids[-(self.last or 0) :].tolist(), asked.target]))
            for asked in predictions
        ]
        return np.stack([self.bm25.scores(text).astype(np.float32) for text in texts])
