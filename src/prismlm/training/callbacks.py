"""What happens between the steps of a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.progress import Task
from prismlm.training import distributed
from prismlm.training.initialise import Rows, place_prototypes
from prismlm.training.model import PrismForCausalLM


class HeadSchedule(TrainerCallback):
    """Places the prototypes before a step and raises the weights of the head's losses.

        s(t) = min(1, (t − placed) / (full − placed)),   full = warmup · steps

    Args:
        rows: training rows, whose hidden states the prototypes are placed on.
        initialise_at_step: how many steps the model trains alone.
        warmup: share of all steps after which the weights are full.
        seed: decides which states; the generator is the head's own.
    """

    def __init__(self, rows: Rows, *, initialise_at_step: int, warmup: float, seed: int) -> None:
        self._rows = rows
        self._start = initialise_at_step
        self._warmup = warmup
        self._seed = seed

    def loss_scale(self, step: int, steps: int) -> float:
        """Return the factor of the head's losses in the step after ``step`` steps."""
        rise = self._warmup * steps - self._start
        return 1.0 if rise <= 0 else min(1.0, max(0.0, (step - self._start) / rise))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Place the prototypes when it is time; set the factor."""
        model: PrismForCausalLM = kwargs["model"]
        if state.global_step >= self._start and not model.placed:
            generator = torch.Generator().manual_seed(self._seed)
            place_prototypes(model, self._rows, generator)
            distributed.broadcast_parameters(model.prototype_head)
        model.loss_scale = self.loss_scale(state.global_step, state.max_steps)


class EvaluateEvery(TrainerCallback):
    """Asks for an evaluation every ``steps`` steps, but not after the last, which has its own."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask if it is time."""
        if state.global_step < state.max_steps and state.global_step % self._steps == 0:
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


class StopOnInterrupt(TrainerCallback):
    """Ends training after the current step, with a checkpoint, once Ctrl-C was pressed.

    A second Ctrl-C ends it at once; the newest checkpoint on disk stays as it is.
    """

    def __init__(self) -> None:
        self.interrupted = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for a checkpoint and the end, in every process at the same step."""
        self.interrupted = distributed.any_process(self.interrupted)
        if self.interrupted:
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take Ctrl-C over during the block; outside of the main thread, leave it alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGINT)

        def handle(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def tensorboard_callback(directory: Path, first_step: int) -> TrainerCallback:
    """Return a callback that writes TensorBoard files, dropping what a resumed run does again."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    writer = SummaryWriter(str(directory), purge_step=first_step or None)
    return TensorBoardCallback(writer)
