"""What a run will take, from a few real steps."""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.models.quiet import quiet_transformers
from prismlm.training.recipe import Recipe
from prismlm.training.run import check_out
from prismlm.training.setup import build_trainer, prepare, uses_bf16

WARMUP_STEPS = 1
MEASURED_STEPS = 3


@dataclass(frozen=True)
class TrainingEstimate:
    """What ``prismlm train`` will take.

    Attributes:
        parameters: of the model, and of the head.
        steps: optimizer steps.
        tokens: positions trained on.
        corpus_tokens: tokens in the training rows.
        passes: how often the whole training text is read.
        precision: float32 or bf16.
        device: where it runs.
        seconds_per_step: the median of a few real steps with the head in place.
        seconds: for all steps, evaluations left out.
        memory_bytes: the most memory in use while measuring.
        disk_bytes: the finished model, and the checkpoints that are kept, with their optimizer.
    """

    parameters: int
    head_parameters: int
    steps: int
    tokens: int
    corpus_tokens: int
    passes: float
    precision: str
    device: str
    seconds_per_step: float
    seconds: float
    memory_bytes: int
    disk_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        return asdict(self)


def estimate(recipe: Recipe, *, resume: bool = False) -> TrainingEstimate:
    """Measure a few real steps and say what the run will take; nothing is written to ``out``.

    Raises:
        InputError: as :func:`prismlm.training.run.train`.
    """
    check_out(recipe, resume=resume)
    steps = WARMUP_STEPS + MEASURED_STEPS
    short = recipe.model_copy(
        update={
            "steps": steps,
            "head": recipe.head.model_copy(update={"initialise_at_step": 0}),
            "evaluation": recipe.evaluation.model_copy(update={"every": 0}),
            "checkpoint": recipe.checkpoint.model_copy(update={"every": steps, "keep": 1}),
        }
    )
    prepared = prepare(short)
    clock = _Clock()
    with quiet_transformers(), tempfile.TemporaryDirectory() as name:
        trainer = build_trainer(prepared, Path(name), [clock])
        trainer.train()
        checkpoint_bytes = _size(Path(name))
    parameters = sum(p.numel() for p in prepared.model.model.parameters())
    head_parameters = sum(p.numel() for p in prepared.model.prototype_head.parameters())
    times = sorted(clock.seconds[WARMUP_STEPS:])
    per_step = times[len(times) // 2]
    tokens = recipe.steps * recipe.positions_per_step
    kept = min(recipe.checkpoint.keep, -(-recipe.steps // recipe.checkpoint.every))
    return TrainingEstimate(
        parameters=parameters,
        head_parameters=head_parameters,
        steps=recipe.steps,
        tokens=tokens,
        corpus_tokens=prepared.rows.num_tokens,
        passes=tokens / (len(prepared.rows) * recipe.data.length),
        precision="bf16" if uses_bf16(recipe.precision) else "float32",
        device=str(trainer.args.device),
        seconds_per_step=per_step,
        seconds=per_step * recipe.steps,
        memory_bytes=_memory(),
        disk_bytes=kept * checkpoint_bytes + 4 * (parameters + head_parameters),
    )


class _Clock(TrainerCallback):
    """Times steps from their beginning to their end, so without logs and checkpoints."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._began)


def _memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
