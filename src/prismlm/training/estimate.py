"""What a run will take: a few real steps are timed, and multiplied."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from prismlm.cost import Cost, peak_memory
from prismlm.models.checkpoint import quiet_transformers
from prismlm.training.recipe import Recipe
from prismlm.training.run import check_new
from prismlm.training.setup import device_of, prepare, resolved, with_steps
from prismlm.training.trainer import PrismTrainer

MEASURED_STEPS = 3


def estimate(recipe: Recipe, *, resume: bool = False) -> Cost:
    """Say what the run will take, from a few real steps; nothing is written to ``out``.

    Evaluations are left out; disk is the finished model, and the checkpoints that are kept, with
    their optimizer. The figures are ``parameters`` of the model, ``head_parameters``; optimizer
    ``steps``; ``tokens``, positions that one process trains on; ``corpus_tokens`` in the training
    rows, ``passes`` over them and their share of ``padding``; ``precision``, ``device`` and
    ``seconds_per_step``.

    Raises:
        InputError: as :func:`prismlm.training.run.train`.
    """
    check_new(recipe.out, resume=resume)
    # The first step warms up.
    count = 1 + MEASURED_STEPS
    changes = {
        "steps": count,
        "head": recipe.head.model_copy(update={"initialise_at_step": 0}),
        "evaluation": recipe.evaluation.model_copy(update={"every": 0}),
        "checkpoint": recipe.checkpoint.model_copy(update={"every": count, "keep": 1}),
        "logging": recipe.logging.model_copy(update={"report_to": ()}),
    }
    prepared = prepare(recipe.model_copy(update=changes))
    clock = _Clock()
    with quiet_transformers(), tempfile.TemporaryDirectory() as name:
        trainer = PrismTrainer(prepared, Path(name), [clock])
        trainer.train()
        checkpoint = sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())
    per_step = sorted(clock.seconds[1:])[MEASURED_STEPS // 2]
    rows, recipe = prepared.rows, with_steps(recipe, prepared.rows)
    tokens = recipe.steps * recipe.positions_per_step
    whole, head = (
        sum(p.numel() for p in module.parameters())
        for module in (prepared.model, prepared.model.prototype_head)
    )
    kept = min(recipe.checkpoint.keep, -(-recipe.steps // recipe.checkpoint.every))
    figures = {
        "parameters": whole - head,
        "head_parameters": head,
        "steps": recipe.steps,
        "seconds_per_step": per_step,
        "tokens": tokens,
        "corpus_tokens": rows.num_tokens,
        "passes": tokens / (len(rows) * recipe.data.length),
        "padding": 1 - rows.fill,
        "precision": resolved(recipe)["precision"],
        "device": str(trainer.args.device),
    }
    return Cost(
        per_step * recipe.steps,
        peak_memory(device_of(recipe)),
        kept * checkpoint + 4 * whole,
        figures,
        basis=f"Measured on {MEASURED_STEPS} real steps.",
    )


class _Clock(TrainerCallback):
    """Times steps from their beginning to their end, so without logs and checkpoints."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._began)
