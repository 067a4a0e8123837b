"""Whether the corpus holds anything like an answer: strong, weak or no support."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from prismlm.index.support import POWER, Bounds, SupportScale, answer_score

Level = Literal["strong", "weak", "none"]
# What each level says, to people.
WORDS: dict[Level, str] = {
    "strong": "closer to this corpus than held-out text of the same kind",
    "weak": "no closer to this corpus than held-out text of the same kind",
    "none": "nothing in this corpus is about the answer",
}


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
        level: strong above ``high`` or, at places, ``high_places``; else none below ``low`` or, in
            words, ``low_words``; else weak.
        score: mean F + ln mean m over its predictions; mean F where m is not known.
        places: the mean of F¹⁶: whether some predictions are very near.
        words: mean m: how many tokens from each on stand together in the corpus; None: not known.
        low, high, high_places, low_words: what 5 % of unseen text of this length lies below,
            2.5 % above, each, and 2 % below.
        tokens: of each prediction.
    """

    level: Level
    score: float
    places: float
    words: float | None
    low: float
    high: float
    high_places: float
    low_words: float
    tokens: tuple[TokenSupport, ...]

    @property
    def sentence(self) -> str:
        """What the level says, as a sentence."""
        return sentence(self.level)

    def to_dict(self) -> dict[str, Any]:
        """Return the part of ``prismlm explain --json``."""
        return asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}


def sentence(level: Level) -> str:
    """Return what a level says, as a sentence."""
    return f"{'No' if level == 'none' else level.capitalize()} support: {WORDS[level]}."


class SupportCount:
    """Counts the levels of many texts, and adds up their scores."""

    def __init__(self) -> None:
        self.levels: dict[Level, int] = dict.fromkeys(get_args(Level), 0)
        self._score = 0.0

    def add(self, support: Support | None) -> None:
        """Count one text; None, of a lens without a scale, counts as no text."""
        if support is not None:
            self.levels[support.level] += 1
            self._score += support.score

    def to_dict(self) -> dict[str, Any] | None:
        """Return how many texts have each level, and their mean score; None without texts."""
        texts = sum(self.levels.values())
        return {"levels": dict(self.levels), "score": self._score / texts} if texts else None


def levels_in_words(levels: dict[Level, int]) -> str:
    """Return counts of levels as "3 strong, 40 weak, 2 none"."""
    return ", ".join(f"{count:,} {level}" for level, count in levels.items())


def support_of(
    nearest: np.ndarray, scale: SupportScale, matched: np.ndarray | None = None
) -> Support:
    """Return the support of an answer; :mod:`prismlm.index.support` has the equation.

    Args:
        nearest: the nearest cosine of each prediction, [n].
        scale: of the lens.
        matched: m of each, int [n]; None where the scale does without.
    """
    scores = scale.score(nearest)
    single, whole = scale.bounds(1), scale.bounds(len(nearest))
    tokens = tuple(
        TokenSupport(_level(score, score**POWER, None, single), cosine, score)
        for cosine, score in zip(nearest.tolist(), scores.tolist(), strict=True)
    )
    score, places = answer_score(scores, matched), float((scores**POWER).mean())
    words = None if matched is None else float(matched.mean())
    return Support(_level(score, places, words, whole), score, places, words, *whole, tokens)


def _level(score: float, places: float, words: float | None, bounds: Bounds) -> Level:
    if score > bounds.high or places > bounds.high_places:
        return "strong"
    few = words is not None and words < bounds.low_words
    return "none" if few or score < bounds.low else "weak"
