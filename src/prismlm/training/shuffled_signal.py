"""The control of uncertainty feedback: the same codes, at positions that they say nothing of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.models.uncertainty_feedback import UncertaintyFeedback
from prismlm.ops.uncertainty_feedback import shuffle_codes
from prismlm.training import distributed
from prismlm.training.recipe import Recipe


class ShuffledSignal(TrainerCallback):
    """Permutes the codes of a micro-batch over its positions in all processes.

    A row of the table is visited as often as with the signal in order, and what the model gains
    beyond that is no use of its uncertainty. The order is drawn from the seed, the step and the
    number of the micro-batch in it: a resumed run draws the same, and processes the same as one
    with all their rows.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = 0
        self._calls = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the step."""
        self._step, self._calls = state.global_step, 0

    def __call__(self, codes: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
        """Return the codes of this process's rows; every process has to call."""
        drawn = np.random.SeedSequence([self._seed, self._step, self._calls])
        generator = torch.Generator().manual_seed(int(drawn.generate_state(1, np.uint64)[0]))
        self._calls += 1
        everywhere = shuffle_codes(distributed.concatenate(codes), generator)
        first = distributed.rank() * len(codes)
        return everywhere[first : first + len(codes)]


def shuffled_signal_callbacks(
    recipe: Recipe, feedback: UncertaintyFeedback | None
) -> list[TrainerCallback]:
    """Let feedback shuffle its signal, if the recipe says so; return what knows of the steps."""
    if feedback is None or recipe.uncertainty_feedback.signal == "own":
        return []
    shuffled = ShuffledSignal(recipe.seed)
    feedback.rearrange = shuffled
    return [shuffled]
