"""What a run will take: a few real steps are timed, and multiplied."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.corpus.store import Corpus
from prismlm.cost import Cost, peak_memory
from prismlm.errors import InputError
from prismlm.models.checkpoint import quiet_transformers
from prismlm.models.device import uses_bf16
from prismlm.models.presets import build_config, build_model
from prismlm.training.checkpoints import BYTES_PER_PARAMETER
from prismlm.training.device import device_of
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import check_run_directory
from prismlm.training.setup import Prepared, build_trainer, prepare, with_steps

WARMUP_STEPS = 1
MEASURED_STEPS = 3


def estimate(recipe: Recipe, *, resume: bool = False) -> Cost:
    """Say what the run will take, from a few real steps; nothing is written to ``out``.

    Evaluations are left out; disk is the finished model, and the checkpoints that are kept, with
    their optimizer. The figures are ``parameters`` of the model, ``head_parameters``; optimizer
    ``steps``; ``tokens``, positions that one process trains on; ``corpus_tokens`` in the training
    rows, ``passes`` over them and their share of ``padding``; ``precision``, ``device`` and
    ``seconds_per_step``.

    Raises:
        InputError: as :func:`prismlm.training.run.train`, or the model does not fit here.
    """
    check_run_directory(recipe, resume=resume)
    _check_memory(recipe, len(Corpus.open(recipe.corpus).tokenizer))
    step, prepared = _measure(recipe)
    rows, module = prepared.rows, prepared.model
    recipe = with_steps(recipe, rows)
    tokens = recipe.steps * recipe.positions_per_step
    kept = min(recipe.checkpoint.keep, -(-recipe.steps // recipe.checkpoint.every))
    whole = sum(p.numel() for p in module.parameters())
    head = module.prototype_head
    of_head = 0 if head is None else sum(p.numel() for p in head.parameters())
    figures = {
        "parameters": whole - of_head,
        "head_parameters": of_head,
        "steps": recipe.steps,
        "seconds_per_step": step.seconds,
        "tokens": tokens,
        "corpus_tokens": rows.num_tokens,
        "passes": tokens / (len(rows) * recipe.data.length),
        "padding": 1 - rows.fill,
        **step.figures,
    }
    return replace(
        step,
        seconds=(step.seconds or 0.0) * recipe.steps,
        disk_bytes=kept * (step.disk_bytes or 0) + 4 * whole,
        figures=figures,
    )


def _check_memory(recipe: Recipe, vocab_size: int) -> None:
    """Raise InputError for a model whose weights and optimizer alone do not fit here."""
    device = device_of(recipe)
    with torch.device("meta"):
        model = build_model(build_config(dict(recipe.model), vocab_size, 0))
    needed = (4 + BYTES_PER_PARAMETER) * sum(p.numel() for p in model.parameters())
    free = _free_memory(device)
    if free is not None and needed > free:
        raise InputError(
            f"the model needs at least {needed / 1e9:.1f} GB to train, and {free / 1e9:.1f} GB are "
            f"free on {device} here. A dry run measures real steps: run it where it is to train."
        )


def _free_memory(device: str) -> int | None:
    """Return the bytes free on a device here, or None if it does not say."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _measure(recipe: Recipe) -> tuple[Cost, Prepared]:
    """Return the cost of a step, and of a checkpoint, as they are measured, and what ran."""
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
        {"precision": precision, "device": str(trainer.args.device)},
        basis=f"Measured on {MEASURED_STEPS} real steps.",
    )
    return cost, prepared


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
