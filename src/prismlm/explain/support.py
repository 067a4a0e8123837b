"""How well the corpus supports an answer (strong, weak, none), and a summary of it in words.

A prediction of the token y counts by how much y tells under the corpus, p(y) being the share of its
positions after which y came next:

    w_t = ε + max(0, −ln p(y_t) − c)²

so that names count, and "the" hardly does. Shares, documents and passages are sums of w_t times the
evidence of each prediction. c = 5 and the square put the document that holds an answer first most
often, on questions to a model that half knew its texts (docs/results/asked.md).

A document carries a prediction where one of its positions came before the same token, in a state
that is at least as near as the nearest of half the predictions of unseen text
(:mod:`prismlm.lens.support`). Each token y of the answer counted once, support is the largest part
of what the answer tells that one document carries:

    s = max_d  Σ_{y carried by d} w(y) / Σ_y w(y)

Many documents that share a word each are not about the answer; one document that has its names and
terms together is. Strong is s ≥ 0.8, none s < 0.25; docs/results/asked.md has the error rates, on
questions that these bounds were not chosen on. An answer of common words alone, with Σ_y w(y) < 1,
says nothing that a document could hold, and is weak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from prismlm.lens.support import SupportScale

# c in nats, and ε.
COMMON, LEAST = 5.0, 0.01
STRONG, NONE = 0.8, 0.25
LEAST_TOLD = 1.0
# Of single predictions: strong or none is what all but this share of unseen text lies within.
BEYOND = 0.05
Level = Literal["strong", "weak", "none"]
# What each level says, to people.
WORDS: dict[Level, str] = {
    "strong": "one document of this corpus holds nearly all that the answer tells",
    "weak": "this corpus holds only parts of what the answer tells",
    "none": "nothing in this corpus is about the answer",
}
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class TokenSupport:
    """The support of one prediction.

    Attributes:
        level: for the single token.
        nearest: the largest cosine of its state to a position of the active cells where the
            predicted token came next; −1 where there is none.
        score: F, the share of unseen predictions that come less near.
    """

    level: Level
    nearest: float
    score: float


@dataclass(frozen=True)
class Support:
    """The support of an answer.

    Attributes:
        level: strong from 0.8 on, none below 0.25.
        score: s, the largest part of what the answer tells that one document carries.
        tokens: of each prediction.
    """

    level: Level
    score: float
    tokens: tuple[TokenSupport, ...]

    @property
    def sentence(self) -> str:
        """What the level says, as a sentence."""
        return sentence(self.level)

    def to_dict(self) -> dict[str, Any]:
        """Return the part of ``prismlm explain --json``."""
        return asdict(self)


def sentence(level: Level) -> str:
    """Return what a level says, as a sentence."""
    return f"{'No' if level == 'none' else level.capitalize()} support: {WORDS[level]}."


def levels_in_words(levels: Mapping[Level, int]) -> str:
    """Return counts of levels as "3 strong, 40 weak, 2 none"."""
    return ", ".join(f"{count:,} {level}" for level, count in levels.items())


class Told(NamedTuple):
    """What T predictions tell, and which documents carry them.

    Attributes:
        tokens: the predicted tokens, int64 [T].
        weights: w of each, float64 [T].
        nearest: the nearest cosine of each, float32 [T].
        carried: (prediction, document) pairs: which document carries which, int64 [m, 2].
    """

    tokens: np.ndarray
    weights: np.ndarray
    nearest: np.ndarray
    carried: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Told]) -> Told:
        """Return what successive predictions tell."""
        firsts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        shifted = [
            part._replace(carried=part.carried + np.array([first, 0]))
            for part, first in zip(parts, firsts, strict=False)
        ]
        return cls(*(np.concatenate(column) for column in zip(*shifted, strict=True)))

    def by_document(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return documents, int [m], the part of what is told that each carries, and Σ_y w(y)."""
        distinct, number = np.unique(self.tokens, return_inverse=True)
        weight = np.zeros(len(distinct))
        weight[number] = self.weights
        prediction, document = self.carried.T
        pairs = np.unique(document * len(distinct) + number[prediction])
        documents, owner = np.unique(pairs // len(distinct), return_inverse=True)
        sums = np.bincount(owner, weight[pairs % len(distinct)], minlength=len(documents))
        return documents, sums / weight.sum(), float(weight.sum())

    def support(self, scale: SupportScale) -> Support:
        """Return the level of support on the scale of a lens."""
        _, shares, total = self.by_document()
        score = float(shares.max(initial=0))
        singles = tuple(
            TokenSupport(_level(one, BEYOND, 1 - BEYOND), cosine, one)
            for one, cosine in zip(
                scale.score(self.nearest).tolist(), self.nearest.tolist(), strict=True
            )
        )
        level = _level(score, NONE, STRONG) if total >= LEAST_TOLD else "weak"
        return Support(level, score, singles)


def token_weights(rates: np.ndarray, positions: int, common: float = COMMON) -> np.ndarray:
    """Return w of tokens that come next at these shares of so many positions; see the module.

    A token that never comes next counts as half of one of the positions.
    """
    telling = np.maximum(0.0, -np.log(np.maximum(rates, 0.5 / positions)) - common)
    return LEAST + telling**2


def _level(score: float, none: float, strong: float) -> Level:
    return "strong" if score >= strong else "none" if score < none else "weak"


class SupportCount:
    """Counts the levels of many texts, and adds up their scores."""

    def __init__(self) -> None:
        self.levels: dict[Level, int] = dict.fromkeys(LEVELS, 0)
        self._score = 0.0

    def add(self, support: Support | None) -> None:
        """Count one text, unless its support is unknown."""
        if support is not None:
            self.levels[support.level] += 1
            self._score += support.score

    def to_dict(self) -> dict[str, Any] | None:
        """Return how many texts have each level, and their mean score; None without texts."""
        texts = sum(self.levels.values())
        return {"levels": dict(self.levels), "score": self._score / texts} if texts else None
