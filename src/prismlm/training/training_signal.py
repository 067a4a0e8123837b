"""Signals to train uncertainty feedback with in place of a model's own: controls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from prismlm.models.uncertainty_feedback import UncertaintyFeedback
from prismlm.ops.uncertainty_feedback import NO_CODE, entropy_codes, neutral_code, shuffle_codes
from prismlm.training import parallel
from prismlm.training.recipe import Recipe


class ShuffledSignal(TrainerCallback):
    """Permutes the codes of a micro-batch over its positions in all processes.

    A row of the table is visited as often as with the signal in order, and what the model gains
    beyond that is no use of its uncertainty. The order is drawn from the seed, the step and the
    number of the micro-batch in it: a resumed run draws the same, and processes the same as one
    with all their rows.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = self._calls = 0

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Note the step."""
        self._step, self._calls = state.global_step, 0

    def __call__(self, codes: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
        """Return the codes of this process's rows; every process has to call."""
        drawn = np.random.SeedSequence([self._seed, self._step, self._calls])
        generator = torch.Generator().manual_seed(int(drawn.generate_state(1, np.uint64)[0]))
        self._calls += 1
        everywhere = shuffle_codes(parallel.concatenate(codes), generator)
        return everywhere[parallel.rank() * len(codes) :][: len(codes)]


class PreviousBatch:
    """Feeds a batch the codes of the batch before it, as the source's pseudo-code does in training.

        c_t of batch n = code of the entropy at position t − 1 of the same row number of batch n − 1

    Codes are cut or padded with neutral ones to the length of the batch; the first batch, and one
    of another number of rows, has neutral codes. A row's first token has none. Where documents
    begin within a row is not looked at. It is a control: the codes say nothing of the text that
    they are fed to.

    Source: PRISMA, "Forward Pass Modifications".
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self._codes: Int64[Tensor, "B S"] | None = None

    def __call__(self, codes: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
        """Return what is fed in place of a batch's own codes."""
        fed = torch.full_like(codes, neutral_code(self._levels))
        if self._codes is not None and len(self._codes) == len(codes):
            before = self._codes[:, : codes.shape[1] - 1]
            fed[:, 1 : before.shape[1] + 1] = before
        fed[:, 0] = NO_CODE
        return fed

    def remember(self, logits: Float[Tensor, "B S V"]) -> None:
        """Take the codes of a batch's predictions, which the next batch is fed."""
        self._codes = entropy_codes(logits, self._levels)

    def after_forward(self, model: Any, args: Any, output: Any) -> None:
        """Do so with a forward pass in training: a forward hook."""
        if model.training:
            self.remember(output.logits)


def set_training_signal(recipe: Recipe, feedback: UncertaintyFeedback) -> list[TrainerCallback]:
    """Let a model train with the recipe's signal; return what has to know of the steps."""
    settings = recipe.uncertainty_feedback
    if settings.signal == "previous_batch":
        feedback.rearrange = signal = PreviousBatch(settings.levels)
        feedback.model.register_forward_hook(signal.after_forward)
    elif settings.signal == "shuffled":
        feedback.rearrange = shuffled = ShuffledSignal(recipe.seed)
        return [shuffled]
    return []
