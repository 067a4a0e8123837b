"""What a recipe changes from step to step: prototypes and their losses, λ, control signals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from prismlm.corpus.packing import PackedDataset
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.models.uncertainty_feedback import UncertaintyFeedback
from prismlm.ops.uncertainty_feedback import NO_CODE, entropy_codes, neutral_code, shuffle_codes
from prismlm.training import parallel
from prismlm.training.model import PrismForCausalLM, initialise_prototypes
from prismlm.training.recipe import NoiseWeightRecipe, Recipe
from prismlm.training.setup import Prepared


def recipe_callbacks(prepared: Prepared) -> list[TrainerCallback]:
    """Return the callbacks that a recipe needs."""
    recipe, model = prepared.recipe, prepared.model
    callbacks: list[TrainerCallback] = []
    if recipe.head.enabled:
        callbacks.append(HeadSchedule(prepared.rows, recipe))
    if isinstance(model.model, SignalNoiseForCausalLM):
        noise_weight = recipe.noise_weight or NoiseWeightRecipe()
        callbacks.append(NoiseWeightSchedule(model.model, noise_weight))
    if model.uncertainty is not None:
        callbacks += set_training_signal(recipe, model.uncertainty)
    if recipe.evaluation.every:
        callbacks.append(EvaluateEvery(recipe.evaluation.every))
    return callbacks


class HeadSchedule(TrainerCallback):
    """Initialises the prototypes before step t₀, then scales their losses.

    s(t) = min(1, (t − t₀) / (warmup · steps − t₀))
    """

    def __init__(self, rows: PackedDataset, recipe: Recipe) -> None:
        self.rows, self.recipe = rows, recipe

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Initialise the prototypes if it is time; set the loss scale of the step."""
        model: PrismForCausalLM = kwargs["model"]
        step, start = state.global_step, self.recipe.initialisation_step
        if step >= start and not model.initialised:
            generator = torch.Generator().manual_seed(self.recipe.seed)
            initialise_prototypes(model, self.rows, generator, self.recipe.head.initialise)
            for parameter in model.prototype_head.parameters():
                parallel.broadcast(parameter)
        rising = self.recipe.losses.warmup * state.max_steps - start
        model.loss_scale = min(1.0, max(0, step - start) / rising) if rising > 0 else 1.0
        model.step = step


class EvaluateEvery(TrainerCallback):
    """Evaluates every ``steps`` steps, except after the last, which has the final evaluation."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Request an evaluation if it is time."""
        if state.global_step < state.max_steps and state.global_step % self._steps == 0:
            control.should_evaluate = True


def noise_weight_at(step: int, steps: int, *, initial: float, final: float) -> float:
    """Return λ at a step.

        λ(t) = λ₀ + (λ₁ − λ₀) (1 − cos(π t / (T − 1))) / 2,   t = 0 … T − 1

    A run of a single step has λ₁. Source: Prism, §3, where λ rises from 0.01 to 0.1.
    """
    progress = min(1.0, step / (steps - 1)) if steps > 1 else 1.0
    return initial + (final - initial) * (1 - math.cos(math.pi * progress)) / 2


class NoiseWeightSchedule(TrainerCallback):
    """Sets λ before each step."""

    def __init__(self, decoder: SignalNoiseForCausalLM, settings: NoiseWeightRecipe) -> None:
        self._decoder, self._ends = decoder, settings.model_dump()

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set λ."""
        weight = noise_weight_at(state.global_step, state.max_steps, **self._ends)
        self._decoder.set_noise_weight(weight)


class ShuffledSignal(TrainerCallback):
    """A control: permutes the codes of a micro-batch over its positions in all processes.

    The permutation depends on the seed, the step and the number of the micro-batch.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = self._calls = 0

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Note the step."""
        self._step, self._calls = state.global_step, 0

    def __call__(self, codes: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
        """Return permuted codes for this process's rows; every process has to call."""
        sequence = np.random.SeedSequence([self._seed, self._step, self._calls])
        generator = torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
        self._calls += 1
        shuffled = shuffle_codes(parallel.concatenate(codes), generator)
        return shuffled[parallel.rank() * len(codes) :][: len(codes)]


class PreviousBatch:
    """A control: feeds back the codes of the previous batch, as the source's pseudo-code does.

        c_t of batch n = code of the entropy at position t − 1 of the same row of batch n − 1

    Missing codes are neutral, all of them if the number of rows changes; first tokens have none.

    Source: PRISMA, "Forward Pass Modifications".
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self._codes: Int64[Tensor, "B S"] | None = None

    def __call__(self, codes: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
        """Return what is fed back in place of a batch's own codes."""
        previous = torch.full_like(codes, neutral_code(self._levels))
        if self._codes is not None and len(self._codes) == len(codes):
            known = self._codes[:, : codes.shape[1] - 1]
            previous[:, 1 : known.shape[1] + 1] = known
        previous[:, 0] = NO_CODE
        return previous

    def remember(self, logits: Float[Tensor, "B S V"]) -> None:
        """Keep the codes of a batch's predictions for the next batch."""
        self._codes = entropy_codes(logits, self._levels)

    def after_forward(self, model: Any, args: Any, output: Any) -> None:
        """Keep the codes of a forward pass in training: a forward hook."""
        if model.training:
            self.remember(output.logits)


def set_training_signal(recipe: Recipe, feedback: UncertaintyFeedback) -> list[TrainerCallback]:
    """Set what a recipe feeds back in training; return the callbacks that this needs."""
    settings = recipe.uncertainty_feedback
    if settings.signal == "previous_batch":
        feedback.rearrange = signal = PreviousBatch(settings.levels)
        feedback.model.register_forward_hook(signal.after_forward)
    elif settings.signal == "shuffled":
        feedback.rearrange = shuffled = ShuffledSignal(recipe.seed)
        return [shuffled]
    return []
