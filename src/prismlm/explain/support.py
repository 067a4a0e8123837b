"""Whether the corpus holds anything like an answer: strong, weak or no support."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from prismlm.index.support import SupportScale

Level = Literal["strong", "weak", "none"]
# What each level says, to people.
WORDS: dict[Level, str] = {
    "strong": "nearer than text of its kind that the corpus does not hold",
    "weak": "as near as text of its kind that the corpus does not hold",
    "none": "not in this corpus: farther than unseen text of its kind",
}


@dataclass(frozen=True)
class TokenSupport:
    """The support of one prediction.

    Attributes:
        level: for the single token.
        nearest: the largest cosine of its state to a position of the active cells where the
            predicted token came next; −1 where there is none.
        score: the share of unseen predictions that come less near.
    """

    level: Level
    nearest: float
    score: float


@dataclass(frozen=True)
class Support:
    """The support of an answer.

    Attributes:
        level: strong above ``high``, none below ``low``.
        score: the mean over its predictions, in [0, 1]; unseen text has about 0.5.
        low, high: the scores that 5 % of unseen text of this length lies below, and above.
        tokens: of each prediction.
    """

    level: Level
    score: float
    low: float
    high: float
    tokens: tuple[TokenSupport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the part of ``prismlm explain --json``."""
        return asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}


def support_of(nearest: np.ndarray, scale: SupportScale) -> Support:
    """Return the support of an answer from the nearest cosine of each of its predictions."""
    scores = scale.score(nearest)
    low, high = scale.bounds(1)
    tokens = tuple(
        TokenSupport(_level(score, low, high), cosine, score)
        for cosine, score in zip(nearest.tolist(), scores.tolist(), strict=True)
    )
    low, high = scale.bounds(len(nearest))
    score = float(scores.mean())
    return Support(_level(score, low, high), score, low, high, tokens)


def _level(score: float, low: float, high: float) -> Level:
    return "strong" if score > high else "none" if score < low else "weak"
