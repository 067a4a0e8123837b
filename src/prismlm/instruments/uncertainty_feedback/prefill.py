"""How far a prefill's codes are from the true recursion's, by number of passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from prismlm.instruments.uncertainty_feedback.options import Reading
from prismlm.instruments.uncertainty_feedback.signal import (
    Codes,
    feedback_of,
    pass_codes,
    predictions_of,
    recursion,
    replay,
    summed,
)
from prismlm.instruments.uncertainty_feedback.verdict_words import of_texts, with_interval
from prismlm.statistics import Interval, bootstrap

FAR = 0.01
"""A code that is further off, as a share of all levels, and by more than one, is no rounding."""


@dataclass(frozen=True)
class PassGap:
    """What a number of passes gives, against the recursion.

    Attributes:
        passes: how many.
        differing: share of positions whose code is another.
        far: share of positions whose code is off by more than 1 % of the levels, and by more
            than one level.
        distance: mean |difference of codes| / (levels − 1).
        loss: with the codes of these passes, nats a token.
        loss_change: against the recursion's codes, paired by text.
    """

    passes: int
    differing: float
    far: float
    distance: float
    loss: float
    loss_change: Interval


@dataclass(frozen=True)
class PrefillGap:
    """A prefill's codes against the recursion's.

    Attributes:
        texts: how many.
        positions: positions that have a code.
        levels: of the codes.
        loss: with the recursion's codes, read at once, nats a token.
        rounding: the largest difference between a token's loss read at once with the recursion's
            codes and token by token: what rounding alone does.
        gaps: by number of passes.
    """

    texts: int
    positions: int
    levels: int
    loss: float
    rounding: float
    gaps: tuple[PassGap, ...]

    @property
    def verdict(self) -> str:
        """What it says, in a sentence."""
        last = self.gaps[-1]
        near = "1 level" if FAR * (self.levels - 1) < 1 else f"{FAR:.0%}"
        words = "1 pass gives" if last.passes == 1 else f"{last.passes} passes give"
        return (
            f"{words} {1 - last.far:.1%} of positions a code within {near} of the recursion's "
            f"and a loss that differs by {with_interval(last.loss_change)} nats a token "
            f"{of_texts(self.texts)}."
        )


def prefill_gap(reading: Reading) -> PrefillGap:
    """Return how far the codes of 1, 2, … ``passes`` passes are from those token by token.

    Raises:
        InputError: a model without feedback.
    """
    model, _, texts, _, options, progress = reading
    levels = feedback_of(model).embedding.levels
    true, cached = recursion(model, texts, progress=progress)
    at_once = replay(model, texts, true, progress=progress)
    counts = predictions_of(texts)
    expected = summed(at_once)
    gaps: list[PassGap] = []
    for codes, found in pass_codes(model, texts, options.passes, progress=progress):
        sums = summed(found)
        apart = _apart(codes, true) / (levels - 1)
        gaps.append(
            PassGap(
                passes=len(gaps) + 1,
                differing=float((apart > 0).mean()),
                far=float((apart * (levels - 1) > max(1, FAR * (levels - 1))).mean()),
                distance=float(apart.mean()),
                loss=float(sums.sum() / counts.sum()),
                loss_change=bootstrap(sums - expected, counts, seed=options.seed),
            )
        )
    rounding = max(
        float((a.losses - b.losses).abs().max()) for a, b in zip(cached, at_once, strict=True)
    )
    loss = float(expected.sum() / counts.sum())
    return PrefillGap(len(texts), int(counts.sum()), levels, loss, rounding, tuple(gaps))


def _apart(codes: Codes, true: Codes) -> np.ndarray:
    """Return |c − c′| of every position but the first of each text."""
    found = [(own[1:] - other[1:]).abs() for own, other in zip(codes, true, strict=True)]
    return torch.cat(found).double().numpy()
