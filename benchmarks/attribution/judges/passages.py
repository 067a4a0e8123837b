"""Training text cut into passages, and the predictions that judges ask about.

Every way of saying what a prediction relies on is a :data:`Method`: it is given predictions and
gives each passage of a :class:`PassageBank` a score. What judges such scores knows nothing of how
they came about, so that a new way is one function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

PASSAGE_TOKENS = 128


@dataclass(frozen=True, eq=False)
class Prediction:
    """The tokens before a predicted one, int64 [T], T ≥ 1, and the token to be explained."""

    ids: np.ndarray
    target: int


Method = Callable[[Sequence[Prediction]], np.ndarray]
"""Predictions to scores, float32 [predictions, passages]: the higher, the more responsible."""


@dataclass(frozen=True, eq=False)
class PassageBank:
    """Documents of a corpus, cut into P passages.

    ``documents`` are their numbers in the corpus [D]; ``first`` position and ``length`` of each
    passage [P], and ``document``, the row in ``documents`` that it is from, both ascending.
    """

    corpus: Corpus
    documents: np.ndarray
    first: np.ndarray
    length: np.ndarray
    document: np.ndarray

    @classmethod
    def of(cls, corpus: Corpus, documents: np.ndarray, tokens: int = PASSAGE_TOKENS) -> PassageBank:
        """Cut documents into passages of nearly equal length, at most ``tokens``.

        A document of L tokens has ⌈L / tokens⌉ passages; their lengths differ by at most one, so
        that none is a rest of a token or two.
        """
        length = corpus.lengths[documents]
        pieces = -(-length // tokens)
        row = np.repeat(np.arange(len(documents)), pieces)
        number = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = number * length[row] // pieces[row]
        end = (number + 1) * length[row] // pieces[row]
        return cls(corpus, documents, corpus.starts[documents][row] + begin, end - begin, row)

    @classmethod
    def beginnings(
        cls, corpus: Corpus, documents: np.ndarray, tokens: int = PASSAGE_TOKENS
    ) -> PassageBank:
        """Keep the first ``tokens`` tokens of each document, as one passage."""
        length = np.minimum(corpus.lengths[documents], tokens)
        rows = np.arange(len(documents))
        return cls(corpus, documents, corpus.starts[documents], length, rows)

    def __len__(self) -> int:
        return len(self.first)

    def tokens(self, passage: int) -> np.ndarray:
        """Return the token ids of a passage, int64 [length]."""
        first, length = int(self.first[passage]), int(self.length[passage])
        return self.corpus.tokens(first, length).astype(np.int64)

    def text(self, passage: int) -> str:
        """Return what the tokens of a passage say, without special tokens."""
        ids = self.tokens(passage).tolist()
        return str(self.corpus.tokenizer.decode(ids, skip_special_tokens=True))

    def passage_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the passage that each global position is in, int64; −1 for those in none."""
        rows = np.searchsorted(self.first, positions, side="right") - 1
        inside = (rows >= 0) & (positions < self._ends[rows])
        return np.where(inside, rows, -1)

    def by_document(self, scores: np.ndarray, *, best: bool = False) -> np.ndarray:
        """Return each document's score: [..., P] to float32 [..., D].

        It is the sum over its passages; or that of its best one, for methods whose scores are
        degrees of likeness, which do not add up.
        """
        edges = np.searchsorted(self.document, np.arange(len(self.documents)))
        if best:
            return np.maximum.reduceat(scores, edges, axis=-1)
        return np.add.reduceat(scores, edges, axis=-1, dtype=np.float64).astype(np.float32)

    @cached_property
    def _ends(self) -> np.ndarray:
        return self.first + self.length


def best(scores: np.ndarray, limit: int) -> np.ndarray:
    """Return the columns with the highest scores, int64 [..., limit]; of equals the first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :limit]


def answer_predictions(prompt: Sequence[int], answer: Sequence[int]) -> list[Prediction]:
    """Return the predictions of an answer's tokens, each made after the prompt and those before."""
    ids = np.array([*prompt, *answer], dtype=np.int64)
    return [Prediction(ids[:end], int(ids[end])) for end in range(len(prompt), len(ids))]


def answer_scores(scores: np.ndarray, question: np.ndarray) -> np.ndarray:
    """Join the predictions of each question: each counts alike, whatever its scores sum to.

        s_q = Σ_{t of q} s_t / Σ_p |s_tp|

    ``scores`` are [T, P], ``question`` [T] counts from 0 without gaps. Returns float32 [Q, P]; a
    prediction whose scores are all 0 adds nothing.
    """
    total = np.abs(scores).sum(1, dtype=np.float64)
    factor = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
    joined = np.zeros((int(question.max()) + 1, scores.shape[1]), dtype=np.float32)
    for row, (number, by) in enumerate(zip(question.tolist(), factor.tolist(), strict=True)):
        joined[number] += np.float32(by) * scores[row]
    return joined


def halves(count: int, seed: int) -> np.ndarray:
    """Return whether each question is of the half that choices are made on, bool [count]."""
    order = np.random.default_rng(seed).permutation(count)
    return order < count // 2


def document_recall(
    scores: np.ndarray, planted: Sequence[np.ndarray], limit: int = 10
) -> np.ndarray:
    """Return |n best documents ∩ planted| / min(n, planted) of every question, from scores [Q, D].

    A document without a score above 0 is not named, even where fewer than ``limit`` have one.
    """
    ranked = best(scores, limit)
    hits = [
        len({row for row in named.tolist() if scores[number, row] > 0} & set(rows.tolist()))
        for number, (named, rows) in enumerate(zip(ranked, planted, strict=True))
    ]
    return np.array([hit / min(limit, len(r)) for hit, r in zip(hits, planted, strict=True)])
