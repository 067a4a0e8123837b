"""BM25: passages that share rare words with what was read, and with the predicted token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.retrieval import BM25


class ByWords:
    """BM25 of passages, asked with the text before the prediction and the predicted token.

    Args:
        bank: the passages.
        last: how many tokens of the text are asked with; all of them if left out.
    """

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
