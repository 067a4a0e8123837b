"""What a planted wrong token does to the next predictions, and whether feedback helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback.options import Reading
from prismlm.instruments.uncertainty_feedback.sample import longer_than
from prismlm.instruments.uncertainty_feedback.signal import (
    Replay,
    different,
    no_codes,
    own_codes,
    permuted,
    replay,
)
from prismlm.instruments.uncertainty_feedback.verdict_words import CONSTANT, of_texts, with_interval
from prismlm.models.seam import output_embedding
from prismlm.statistics import Interval, bootstrap

TOLERANCE = 0.1
"""The loss is back when it is so little above that of the intact text, nats."""
SIGNALS = ("own", "zero", "shuffled")


@dataclass(frozen=True)
class AfterMistake:
    """The predictions after a wrong token, less those of the intact text, with one signal.

    Attributes:
        signal: "own", "zero" or "shuffled", fed to both texts.
        entropy: of the prediction at steps 1 … k, nats; step 1 has just read the wrong token.
        loss: likewise.
        mean_entropy: mean of ``entropy``.
        summed_loss: sum of ``loss``, what the mistake costs.
        recovered_after: the first step whose mean loss is within the tolerance, or None.
    """

    signal: str
    entropy: tuple[float, ...]
    loss: tuple[float, ...]
    mean_entropy: Interval
    summed_loss: Interval
    recovered_after: int | None


@dataclass(frozen=True)
class Mistakes:
    """Recovery from planted wrong tokens, with the own signal, none, and a shuffled one.

    Attributes:
        texts: how many; shorter ones are left out.
        draws: mistakes planted in each, one at a time.
        tolerance: of the recovery, nats.
        signals: by signal.
        loss_against_zero: summed loss with the own signal − with none, paired by text.
        loss_against_shuffled: − with shuffled codes.
        entropy_against_zero: mean entropy, likewise.
        entropy_against_shuffled: likewise.
        codes: different ones that a draw fed, of the texts as they are and with the mistakes.
    """

    texts: int
    draws: int
    tolerance: float
    signals: tuple[AfterMistake, ...]
    loss_against_zero: Interval
    loss_against_shuffled: Interval
    entropy_against_zero: Interval
    entropy_against_shuffled: Interval
    codes: int

    @property
    def verdict(self) -> str:
        """What it says, in a sentence."""
        if self.codes < 2:
            return CONSTANT
        zero, shuffled = self.loss_against_zero, self.loss_against_shuffled
        steps = len(self.signals[0].loss)
        figures = (
            f"{with_interval(zero, 3)} nats over {steps} tokens against no signal, "
            f"{with_interval(shuffled, 3)} against shuffled codes {of_texts(self.texts)}"
        )
        if zero.below_zero and shuffled.below_zero:
            return f"With its signal a mistake costs it less: {figures}."
        if zero.value < 0 and shuffled.value < 0:
            return (
                "With its signal a mistake cost it less than with either control, but that may be "
                f"chance: {figures}."
            )
        return f"Recovery with its own signal does not beat both controls: {figures}."


def mistakes(reading: Reading) -> Mistakes:
    """Replace one token of each text by a random one and compare the k predictions after it.

    At step 1 … k the model predicts the tokens after the wrong one, which is no special token;
    text and mistake are the same for every signal. Codes of the planted text are its own, obtained
    as those of the texts were. Shuffled codes of both texts are permuted alike.

    Source: PRISMA, "Does it recover better from mistakes?"; the controls are ours.

    Raises:
        InputError: a model without feedback, or no text of k + 2 tokens.
    """
    model, tokenizer, texts, codes, options, progress = reading
    steps, draws, seed = options.steps, options.mistakes, options.seed
    kept = longer_than(texts, steps + 2)
    if not kept:
        raise InputError(
            f"no text has {steps + 2} tokens, which a mistake and {steps} tokens after it need: "
            "give longer texts."
        )
    rows, own = [texts[n] for n in kept], tuple(codes[n] for n in kept)
    weight = output_embedding(model).weight
    assert isinstance(weight, Tensor)
    vocabulary = min(len(tokenizer), int(model.config.get_text_config().vocab_size))
    pool = np.setdiff1d(np.arange(vocabulary), tokenizer.all_special_ids)
    found = np.zeros((draws, len(SIGNALS), 2, len(rows), steps))
    still = [replay(model, rows, fed) for fed in (own, no_codes(rows))]
    rng, codes_fed = np.random.default_rng(seed), 0
    with progress.task("Planting mistakes", draws * len(rows), "mistakes") as task:
        for draw in range(draws):
            places = [int(rng.integers(1, len(row) - steps)) for row in rows]
            planted = [
                plant_mistake(row, at, pool, rng) for row, at in zip(rows, places, strict=True)
            ]
            theirs, mixed = own_codes(model, planted, options.signal), seed + 1 + draw
            intact = [*still, replay(model, rows, permuted(own, mixed))]
            codes_fed = max(codes_fed, different((*own, *theirs)))
            fed = (theirs, no_codes(rows), permuted(theirs, mixed))
            for number, each in enumerate(fed):
                wrong = replay(model, planted, each)
                found[draw, number] = excess(wrong, intact[number], places, steps)
            task.advance(len(rows))
    found[:, :, 0] *= math.log(len(weight))
    return _result(found.mean(0), draws, seed, codes_fed)


def plant_mistake(text: Tensor, place: int, pool: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Return a text with another token at ``place``, drawn from ``pool``."""
    others = pool[pool != int(text[place])]
    wrong = text.clone()
    wrong[place] = int(rng.choice(others))
    return wrong


def excess(
    wrong: Sequence[Replay], intact: Sequence[Replay], places: Sequence[int], steps: int
) -> Float[np.ndarray, "2 texts k"]:
    """Return what predictions at p … p + k − 1 have more of: entropy over ln V, and loss.

    The first has just read the token at p; its loss is that of the token at p + 1.
    """
    spans = [slice(place, place + steps) for place in places]
    pairs = list(zip(wrong, intact, spans, strict=True))
    entropy = [(a.shares[span] - b.shares[span]).double().numpy() for a, b, span in pairs]
    loss = [(a.losses[span] - b.losses[span]).numpy() for a, b, span in pairs]
    return np.stack([np.stack(entropy), np.stack(loss)])


def _result(
    found: Float[np.ndarray, "signals 2 texts k"], draws: int, seed: int, codes: int
) -> Mistakes:
    def interval(values: np.ndarray) -> Interval:
        return bootstrap(values, seed=seed)

    entropies, losses = found[:, 0].mean(-1), found[:, 1].sum(-1)
    signals: list[AfterMistake] = []
    for number, signal in enumerate(SIGNALS):
        entropy, loss = found[number].mean(1)
        back = np.flatnonzero(loss <= TOLERANCE)
        signals.append(
            AfterMistake(
                signal,
                tuple(entropy.tolist()),
                tuple(loss.tolist()),
                interval(entropies[number]),
                interval(losses[number]),
                int(back[0]) + 1 if len(back) else None,
            )
        )
    return Mistakes(
        found.shape[2],
        draws,
        TOLERANCE,
        tuple(signals),
        interval(losses[0] - losses[1]),
        interval(losses[0] - losses[2]),
        interval(entropies[0] - entropies[1]),
        interval(entropies[0] - entropies[2]),
        codes,
    )
