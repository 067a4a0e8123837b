"""What a run will take: from a few real steps, or on paper where the model cannot run here."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.corpus.packing import PackedDataset
from prismlm.corpus.store import Corpus
from prismlm.cost import Cost, peak_memory
from prismlm.errors import InputError
from prismlm.models.checkpoint import quiet_transformers
from prismlm.models.device import uses_bf16
from prismlm.training import arithmetic
from prismlm.training.arithmetic import Size
from prismlm.training.checkpoints import BYTES_PER_PARAMETER
from prismlm.training.device import device_of
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import check_run_directory
from prismlm.training.setup import build_trainer, prepare, training_rows, with_steps

WARMUP_STEPS = 1
MEASURED_STEPS = 3


def estimate(recipe: Recipe, *, resume: bool = False) -> Cost:
    """Say what the run will take; nothing is written to ``out``.

    A few real steps are measured where the model can run: the recipe's device is here and has
    memory enough. Elsewhere the cost is calculated on the meta device for one named GPU, from
    the formulas and the utilisation in :mod:`prismlm.training.arithmetic`. Evaluations are left
    out; disk is the finished model, and the checkpoints that are kept, with their optimizer.

    The figures are ``parameters`` of the model, ``head_parameters`` and ``table_parameters``, of
    uncertainty codes; optimizer ``steps``; ``tokens``, positions that one process trains on;
    ``corpus_tokens`` in the training rows, ``passes`` over them and their share of ``padding``;
    ``flops_per_token``, calculated; ``precision``, ``device``, ``seconds_per_step``, and whether
    time and memory were ``measured`` here.

    Raises:
        InputError: as :func:`prismlm.training.run.train`, but not for a missing GPU.
    """
    check_run_directory(recipe, resume=resume)
    corpus = Corpus.open(recipe.corpus)
    size = arithmetic.size_of(recipe, len(corpus.tokenizer))
    why_not = _why_not_measured(recipe, size)
    if why_not is None:
        step, rows = _measure(recipe)
    else:
        # Building the model to find out what it does with shared rows is what cannot be done.
        packing = recipe.data.packing
        share_rows = packing == "packed" or (packing == "auto" and size.shares_rows)
        rows = training_rows(recipe, corpus, share_rows=share_rows)
        step = _calculate(recipe, size, why_not)
    recipe = with_steps(recipe, rows)
    tokens = recipe.steps * recipe.positions_per_step
    kept = min(recipe.checkpoint.keep, -(-recipe.steps // recipe.checkpoint.every))
    figures = {
        "parameters": size.parameters,
        "head_parameters": size.head_parameters,
        "table_parameters": size.table_parameters,
        "steps": recipe.steps,
        "seconds_per_step": step.seconds,
        "tokens": tokens,
        "corpus_tokens": rows.num_tokens,
        "passes": tokens / (len(rows) * recipe.data.length),
        "padding": 1 - rows.fill,
        "flops_per_token": arithmetic.flops_per_token(size, recipe),
        **step.figures,
    }
    return replace(
        step,
        seconds=(step.seconds or 0.0) * recipe.steps,
        disk_bytes=kept * (step.disk_bytes or 0) + 4 * size.all_parameters,
        figures=figures,
    )


def _why_not_measured(recipe: Recipe, size: Size) -> str | None:
    """Return why the recipe cannot run here, or None if it can."""
    try:
        device = device_of(recipe)
    except InputError:
        return "there is no CUDA GPU here"
    precision = "bf16" if uses_bf16(recipe.precision, device) else "float32"
    needed = arithmetic.training_bytes(size, recipe, precision)
    free = arithmetic.free_memory(device)
    if free is not None and needed > free:
        return f"it needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free here"
    return None


def _calculate(recipe: Recipe, size: Size, why_not: str) -> Cost:
    """Return the cost of a step, and of a checkpoint, as formulas give it."""
    precision = "bf16" if uses_bf16(recipe.precision, "cuda") else "float32"
    peak = arithmetic.GPU_FLOPS[precision]
    flops = recipe.positions_per_step * arithmetic.flops_per_token(size, recipe)
    return Cost(
        flops / (arithmetic.UTILISATION * peak),
        arithmetic.training_bytes(size, recipe, precision),
        BYTES_PER_PARAMETER * size.all_parameters,
        {"precision": precision, "device": arithmetic.GPU, "measured": False},
        basis=f"Not measured, since {why_not}: calculated for one {arithmetic.GPU}, assuming "
        f"{arithmetic.UTILISATION:.0%} of its {peak / 1e12:.0f} TFLOP/s in {precision}.",
    )


def _measure(recipe: Recipe) -> tuple[Cost, PackedDataset]:
    """Return the cost of a step, and of a checkpoint, as they are measured, and the rows."""
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
        checkpoint = sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())
    times = sorted(clock.seconds[WARMUP_STEPS:])
    device = device_of(recipe)
    precision = "bf16" if uses_bf16(recipe.precision, device) else "float32"
    cost = Cost(
        times[len(times) // 2],
        peak_memory(device),
        checkpoint,
        {"precision": precision, "device": str(trainer.args.device), "measured": True},
        basis=f"Measured on {MEASURED_STEPS} real steps.",
    )
    return cost, prepared.rows


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
