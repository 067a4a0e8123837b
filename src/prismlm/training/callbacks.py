"""What happens between the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.corpus.packing import PackedDataset
from prismlm.progress import Task
from prismlm.run_state import Interrupts
from prismlm.training import distributed
from prismlm.training.initialise import place_prototypes
from prismlm.training.model import PrismForCausalLM
from prismlm.training.recipe import Recipe


@dataclass(eq=False)
class HeadSchedule(TrainerCallback):
    """Places the prototypes before a step, raises the weights of their losses and anneals k.

        s(t) = min(1, (t − placed) / (full − placed)),          full = warmup · steps
        k(t) = max(k, round(k₀ − (k₀ − k) (t − placed) / (last − placed))),   last = anneal_until

    Attributes:
        rows: training rows, whose hidden states the prototypes are placed on.
        recipe: when and how. Its seed decides which states; the generator is the head's own.
    """

    rows: PackedDataset
    recipe: Recipe

    def loss_scale(self, step: int, steps: int) -> float:
        """Return the factor of the head's losses in the step after ``step`` steps."""
        return progress(step, self.recipe.placing_step, self.recipe.losses.warmup * steps)

    def prototypes_per_token(self, step: int, steps: int) -> int:
        """Return k in the step after ``step`` steps."""
        head = self.recipe.head
        first, final = head.anneal_from, head.prototypes_per_token
        if first is None:
            return final
        done = progress(step, self.recipe.placing_step, head.anneal_until * steps)
        return round(first + (final - first) * done)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Place the prototypes when it is time; set the factor, k and the step."""
        model: PrismForCausalLM = kwargs["model"]
        step, steps = state.global_step, state.max_steps
        if step >= self.recipe.placing_step and not model.placed:
            generator = torch.Generator().manual_seed(self.recipe.seed)
            place_prototypes(model, self.rows, generator, self.recipe.head.initialise)
            distributed.broadcast_parameters(model.prototype_head)
        model.loss_scale = self.loss_scale(step, steps)
        model.prototypes_per_token = self.prototypes_per_token(step, steps)
        model.step = step


def progress(step: int, first: int, last: float) -> float:
    """Return how far ``step`` is on the way from ``first`` to ``last``, in [0, 1]."""
    way = last - first
    return 1.0 if way <= 0 else min(1.0, max(0.0, (step - first) / way))


@dataclass(eq=False)
class EvaluateEvery(TrainerCallback):
    """Asks for an evaluation every ``steps`` steps, but not after the last, which has its own."""

    steps: int

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask if it is time."""
        if state.global_step < state.max_steps and state.global_step % self.steps == 0:
            control.should_evaluate = True


class ReportProgress(TrainerCallback):
    """Advances a task by the positions of each step and notes the current figures beside it."""

    def __init__(self, task: Task, positions_per_step: int) -> None:
        self._task = task
        self._positions = positions_per_step
        self._notes: dict[str, str] = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance, and name the step."""
        self._notes["step"] = f"step {state.global_step}/{state.max_steps}"
        self._task.note(" · ".join(self._notes.values()))
        self._task.advance(self._positions)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take in the newest figures."""
        logs: dict[str, float] = kwargs.get("logs") or {}
        for key, label in (("ce", "CE"), ("eval_prototype_only_ce", "prototype-only")):
            if key in logs:
                self._notes[key] = f"{label} {logs[key]:.2f}"


@dataclass(eq=False)
class StopOnInterrupt(TrainerCallback):
    """Ends training after the current step, with a checkpoint, once a signal came.

    A second one ends it at once; the newest checkpoint on disk stays as it is.
    """

    interrupts: Interrupts
    interrupted: bool = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for a checkpoint and the end, in every process at the same step."""
        self.interrupted = distributed.any_process(self.interrupts.received is not None)
        if self.interrupted:
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True


def tensorboard_callback(directory: Path, first_step: int) -> TrainerCallback:
    """Return a callback that writes TensorBoard files, dropping what a resumed run does again."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    writer = SummaryWriter(str(directory), purge_step=first_step or None)
    return TensorBoardCallback(writer)
