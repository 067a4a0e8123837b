"""Which checks can be done of a model and a sample of texts, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from prismlm.errors import InputError, suggest
from prismlm.instruments.uncertainty_feedback.ablation import PERMUTATIONS
from prismlm.instruments.uncertainty_feedback.attention import LEAST_LATER
from prismlm.instruments.uncertainty_feedback.hedging import AFTER, PROMPT, TOKENS
from prismlm.instruments.uncertainty_feedback.mistakes import DRAWS, STEPS
from prismlm.instruments.uncertainty_feedback.prefill import PASSES
from prismlm.instruments.uncertainty_feedback.recursion import cache_of
from prismlm.instruments.uncertainty_feedback.sample import Sample, check_sample, longer_than
from prismlm.instruments.uncertainty_feedback.signal import Signal, evaluating_feedback, feedback_of
from prismlm.models.attention import attention_layers
from prismlm.models.positions import learned_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN = Signal()


class Need(NamedTuple):
    """What a check needs at least."""

    texts: int
    tokens: int


CHECKS = {
    "ablation": Need(4, 2),
    "prefill": Need(4, 2),
    "attention": Need(8, LEAST_LATER + 2),
    "hedging": Need(4, 2),
    "mistakes": Need(4, STEPS + 2),
    "probe": Need(6, 2),
}
"""The checks, each with the fewest texts and their fewest tokens."""


@dataclass(frozen=True)
class InspectOptions:
    """How the checks are done.

    Attributes:
        signal: how the own codes are obtained.
        permutations: of the shuffled signal of the ablation.
        passes: the most, of the gap between prefill and recursion.
        tokens: that are written on, for hedging.
        window: tokens after a step, for hedging.
        steps: predictions after a mistake.
        mistakes: planted in each text, one at a time.
        temperature: of what is written.
        seed: of all that is drawn.
    """

    signal: Signal = OWN
    permutations: int = PERMUTATIONS
    passes: int = PASSES
    tokens: int = TOKENS
    window: int = AFTER
    steps: int = STEPS
    mistakes: int = DRAWS
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        # Said before the first check, not in the middle of the last.
        least = min(self.permutations, self.passes, self.window, self.steps, self.mistakes)
        if least < 1:
            raise InputError(
                f"{self.permutations} permutations, {self.passes} passes, {self.window} tokens "
                f"after a step, {self.steps} after a mistake, {self.mistakes} mistakes: expected "
                "at least 1 of each."
            )
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"a temperature of {self.temperature}: expected 0 or more.")
        if self.seed < 0:
            raise InputError(f"a seed of {self.seed}: expected 0 or more.")


DEFAULTS = InspectOptions()


def checks_for(
    model: PreTrainedModel,
    sample: Sample,
    checks: Sequence[str] = (),
    options: InspectOptions = DEFAULTS,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the checks that can be done, and why others cannot.

    Raises:
        InputError: as :func:`inspect_uncertainty_feedback`.
    """
    for check in checks:
        if check not in CHECKS:
            raise InputError(
                f"there is no check {check!r}: expected {', '.join(CHECKS)}."
                f"{suggest(check, list(CHECKS))}"
            )
    feedback_of(model)
    check_sample(model, sample)
    asked = tuple(dict.fromkeys(checks or CHECKS))
    if "hedging" in asked and options.window >= options.tokens:
        raise InputError(
            f"{options.window} tokens after a step, of {options.tokens} that are written: expected "
            f"1 to {options.tokens - 1}."
        )
    missing = {"attention": _no_attention(model)} | dict.fromkeys(
        ("prefill", "hedging"), _no_cache(model)
    )
    left_out: dict[str, str] = {}
    for check in asked:
        reason = _too_few(check, sample, options) or _too_long(model, check, options)
        if reason is not None and checks:
            raise InputError(reason)
        # What a family has not is no fault of who asks.
        reason = reason or missing.get(check)
        if reason is not None:
            left_out[check] = reason
    planned = tuple(check for check in asked if check not in left_out)
    if not planned and not all(missing.get(check) for check in left_out):
        raise InputError(f"no check can be done: {next(iter(left_out.values()))}")
    return planned, left_out


def _too_few(check: str, sample: Sample, options: InspectOptions) -> str | None:
    texts, tokens = CHECKS[check]
    if check == "mistakes":
        tokens = options.steps + 2
    found = len(longer_than(sample.texts, tokens))
    if found >= texts:
        return None
    return (
        f"{check} needs at least {texts} texts of at least {tokens} tokens, and {sample.name} has "
        f"{found}: give more or longer texts."
    )


def _too_long(model: PreTrainedModel, check: str, options: InspectOptions) -> str | None:
    bound = learned_positions(model)
    if check != "hedging" or bound is None or PROMPT + options.tokens <= bound:
        return None
    return (
        f"hedging writes {options.tokens} tokens after {PROMPT}, and the model has learned "
        f"{bound} positions: write fewer."
    )


def _no_cache(model: PreTrainedModel) -> str | None:
    with evaluating_feedback(model):
        try:
            cache_of(model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device)))
        except InputError as error:
            return str(error)
    return None


def _no_attention(model: PreTrainedModel) -> str | None:
    try:
        attention_layers(model)
    except InputError as error:
        return str(error)
    return None
