"""λ of signal/noise attention while a model trains."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from prismlm.errors import InputError
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.training.recipe import NoiseWeightRecipe, Recipe


def noise_weight_at(step: int, steps: int, *, initial: float, final: float) -> float:
    """Return λ in the step after ``step`` steps.

        λ(t) = λ₀ + (λ₁ − λ₀) (1 − cos(π t / (T − 1))) / 2,   t = 0 … T − 1

    The first step has λ₀ and the last λ₁; a run of one step has λ₁.

    Source: Prism, §3, which rises from 0.01 to 0.1.
    """
    progress = min(1.0, step / (steps - 1)) if steps > 1 else 1.0
    return initial + (final - initial) * (1 - math.cos(math.pi * progress)) / 2


class NoiseWeightSchedule(TrainerCallback):
    """Sets λ before each step; a checkpoint holds that of the last step done."""

    def __init__(self, decoder: SignalNoiseForCausalLM, settings: NoiseWeightRecipe) -> None:
        self._decoder, self._ends = decoder, settings.model_dump()

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set it."""
        weight = noise_weight_at(state.global_step, state.max_steps, **self._ends)
        self._decoder.set_noise_weight(weight)


def noise_weight_of(decoder: nn.Module) -> float | None:
    """Return λ, or None for a model without noise heads."""
    if not isinstance(decoder, SignalNoiseForCausalLM):
        return None
    return decoder.model.noise_weight.item()


def check_noise_weight_of(recipe: Recipe, decoder: PreTrainedModel) -> None:
    """Check that λ is set in the one place where training looks, and for a model that has it."""
    has_noise = isinstance(decoder, SignalNoiseForCausalLM)
    if recipe.noise_weight is not None and not has_noise:
        raise InputError(
            f"the recipe sets noise_weight, and a model of type {decoder.config.model_type!r} has "
            "no noise heads. Leave it out, or train a model of type 'prismlm_signal_noise'."
        )
    if has_noise and "noise_weight" in recipe.model:
        raise InputError(
            "the recipe sets model.noise_weight, and training sets λ before each step. For a fixed "
            "one give noise_weight, beside model, two equal values: initial and final."
        )
