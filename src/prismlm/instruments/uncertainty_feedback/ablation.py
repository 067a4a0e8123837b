"""Does the loss rise when the signal is taken away, made neutral, or shuffled?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback.options import Reading
from prismlm.instruments.uncertainty_feedback.signal import (
    Codes,
    different,
    feedback_of,
    neutral_codes,
    no_codes,
    permuted,
    predictions_of,
    replay,
    summed,
)
from prismlm.instruments.uncertainty_feedback.verdict_words import CONSTANT, of_texts, with_interval
from prismlm.statistics import Interval, bootstrap


@dataclass(frozen=True)
class Ablated:
    """The loss with another signal than the model's own.

    Attributes:
        signal: "zero", nothing is added; "neutral", the code ⌊levels / 2⌋ everywhere; or
            "shuffled", the own codes permuted among all positions of the sample.
        loss: nats a token; of shuffled codes the mean over permutations.
        perplexity: exp of it.
        change: of the loss against the own signal, paired by text; above 0 where it hurts.
        perplexity_change: exp(change) − 1.
        by_permutation: the change with each permutation.
    """

    signal: str
    loss: float
    perplexity: float
    change: Interval
    perplexity_change: Interval
    by_permutation: tuple[float, ...] = ()


@dataclass(frozen=True)
class Ablation:
    """The loss with a model's own signal and with others in its place.

    Attributes:
        texts: how many.
        tokens: predicted tokens.
        codes: different codes among the own.
        loss: with the own signal, nats a token.
        perplexity: exp of it.
        conditions: with others.
    """

    texts: int
    tokens: int
    codes: int
    loss: float
    perplexity: float
    conditions: tuple[Ablated, ...]

    def of(self, signal: str) -> Ablated:
        """Return the figures of one signal.

        Raises:
            InputError: there is none of that name.
        """
        for found in self.conditions:
            if found.signal == signal:
                return found
        known = ", ".join(found.signal for found in self.conditions)
        raise InputError(f"there is no signal {signal!r}: expected {known}.")

    @property
    def verdict(self) -> str:
        """What it says, in a sentence."""
        shuffled, zero = self.of("shuffled").change, self.of("zero").change
        figures = f"{with_interval(shuffled)} nats a token {of_texts(self.texts)}"
        if self.codes < 2:
            return CONSTANT
        if shuffled.above_zero:
            return f"Which code a token gets matters: shuffled codes change the loss by {figures}."
        if shuffled.value > 0:
            said = (
                f"Not clear whether it uses the signal: shuffled codes, the control, change the "
                f"loss by {figures}, which may be chance"
            )
        else:
            said = (
                f"No sign that it uses the signal: shuffled codes, the control, change the loss by "
                f"{figures}"
            )
        if shuffled.below_zero:
            return f"{said}, for the better."
        if zero.above_zero:
            return (
                f"{said}. That nothing added costs {with_interval(zero)} says only that a vector "
                "is expected there."
            )
        return f"{said}."


def ablation(reading: Reading) -> Ablation:
    """Return the loss with a model's own signal, with none, a neutral one and a shuffled one.

    Means are over tokens, intervals over texts. That a vector is missing which the model was
    trained with can hurt by itself; shuffled codes are as frequent as the own, so that only what
    they say is gone.

    Source: PRISMA, "Ablation test", which zeroes the signal; neutral and shuffled are ours.

    Raises:
        InputError: a model without feedback.
    """
    model, _, texts, codes, options, progress = reading
    levels = feedback_of(model).embedding.levels
    own = summed(replay(model, texts, codes, progress=progress, title="Own signal"))
    shuffled = [permuted(codes, options.seed + draw) for draw in range(options.permutations)]
    conditions = (
        _ablated(reading, own, "zero", [no_codes(texts)]),
        _ablated(reading, own, "neutral", [neutral_codes(texts, levels)]),
        _ablated(reading, own, "shuffled", shuffled),
    )
    tokens = int(predictions_of(texts).sum())
    loss = float(own.sum() / tokens)
    return Ablation(len(texts), tokens, different(codes), loss, math.exp(loss), conditions)


def _ablated(reading: Reading, own: np.ndarray, signal: str, draws: Sequence[Codes]) -> Ablated:
    model, _, texts, _, options, progress = reading
    found: list[np.ndarray] = []
    for number, codes in enumerate(draws):
        of = f" {number + 1} of {len(draws)}" if len(draws) > 1 else ""
        title = f"{signal.capitalize()} signal{of}"
        found.append(summed(replay(model, texts, codes, progress=progress, title=title)))
    counts = predictions_of(texts)
    apart = [sums - own for sums in found]
    change = bootstrap(np.mean(apart, 0), counts, seed=options.seed)
    ratio = (math.expm1(x) for x in (change.value, change.low, change.high))
    loss = float(np.mean(found, 0).sum() / counts.sum())
    by_permutation = tuple(float(one.sum() / counts.sum()) for one in apart)
    return Ablated(
        signal,
        loss,
        math.exp(loss),
        change,
        Interval(*ratio),
        by_permutation if signal == "shuffled" else (),
    )
