"""Training from a recipe to a finished model directory, and an estimate of its cost."""

from __future__ import annotations

import importlib.util
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from prismlm.cost import Cost, peak_memory
from prismlm.errors import InputError, NotFiniteError
from prismlm.explain.quality import HeadQuality
from prismlm.files import check_room, keep_json, read_json
from prismlm.models.checkpoint import quiet_transformers
from prismlm.progress import SILENT, Reporter, Task
from prismlm.run_state import EXIT_CODES, LOCK_FILE, Interrupts, check_same, writing
from prismlm.training import parallel
from prismlm.training.evaluation import perplexity, unigram_ce, verdict
from prismlm.training.recipe import SHARDED, Recipe, flat
from prismlm.training.setup import Prepared, describe_run, device_of, prepare, with_steps
from prismlm.training.trainer import (
    CHECKPOINTS,
    HISTORY_FILE,
    PrismTrainer,
    guard_writing,
    last_good,
    latest_checkpoint,
    remove_unfinished,
    step_of,
    write_history,
)

RUN_FILE, TENSORBOARD = "training.json", "tensorboard"
# The directory of a hyper-parameter search, and its best recipe.
SEARCH, BEST_FILE = "search", "best.yaml"
# Settings that may change when a run is resumed, since they do not affect its results.
FREE_TO_CHANGE = (
    "corpus",
    "out",
    "shard_processes",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.asynchronous",
    "logging.tensorboard",
    "logging.report_to",
)
# In a checkpoint, the float32 weight and AdamW's two moments.
BYTES_PER_PARAMETER = 12
MEASURED_STEPS = 3


@dataclass(frozen=True)
class TrainingResult:
    """A finished run."""

    directory: Path
    history_file: Path  # one JSON object per log and evaluation
    ce: float  # of the model on held-out text, in nats per token
    quality: HeadQuality | None  # figures of the head on held-out text, if there is one
    history: list[dict[str, Any]]  # the content of the history file
    steps: int
    tokens: int  # trained on, without padding
    unigram_ce: float  # cross-entropy of token frequencies on held-out text

    @property
    def verdict(self) -> str:
        """What the cross-entropy says about the run, in words."""
        return verdict(self.ce, self.unigram_ce, self.history)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, without the history."""
        return {
            "model": str(self.directory),
            "history": str(self.history_file),
            "steps": self.steps,
            "tokens": self.tokens,
            "ce": self.ce,
            "perplexity": perplexity(self.ce),
            "unigram_ce": self.unigram_ce,
            "verdict": self.verdict,
            "quality": None if self.quality is None else self.quality.to_dict(),
        }


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    without: Collection[int] = (),
    progress: Reporter = SILENT,
    on_warning: Callable[[str], object] | None = None,
) -> TrainingResult:
    """Train a model and its prototypes; write the model directory ``recipe.out``.

    Ctrl-C finishes the current step and writes a checkpoint to ``out/checkpoints``.
    ``resume`` continues from the newest checkpoint in ``out``, if there is one; the documents
    ``without``, by number, are not trained on; ``on_warning`` is called before the first step if
    the text is read too often.

    Raises:
        InputError: the device is not available, the corpus does not fit, ``out`` holds something
            else or is being written to, or the recipe differs from that of the run to resume.
        FormatError: the newest checkpoint is damaged.
        DivergenceError: the loss, a gradient or a weight is not finite.
        PrismError: the disk is full.
        Interrupted: SIGINT or SIGTERM came.
    """
    parallel.join()
    out = recipe.out
    with ExitStack() as stack, quiet_transformers():
        parallel.on_main(lambda: check_new(out, resume=resume))
        _check_trackers(recipe)
        parallel.on_main(lambda: stack.enter_context(writing(out, within=True)))
        prepared = prepare(recipe, without)
        parallel.on_main(lambda: _begin(prepared))
        if on_warning is not None and (warning := prepared.warning()):
            on_warning(warning)
        trainer = PrismTrainer(prepared, out)
        try:
            _take_steps(trainer, progress)
            quality = _measure(trainer, progress)
        except NotFiniteError as error:
            raise trainer.diverged(str(error)) from error
        finally:
            remove_unfinished(trainer.checkpoints)
        # On more text than the evaluations before it.
        last: dict[str, Any] = {"step": trainer.state.global_step, "epoch": trainer.state.epoch}
        last |= {"final_ce": quality.ce, "final_tokens": quality.tokens}
        history = [*trainer.state.log_history, last]
        _write(trainer, quality, history)
    return TrainingResult(
        directory=out,
        history_file=out / HISTORY_FILE,
        ce=quality.ce,
        quality=quality if recipe.head.enabled else None,
        history=history,
        steps=trainer.state.global_step,
        tokens=trainer.tokens_seen(),
        unigram_ce=unigram_ce(prepared.corpus),
    )


def check_ours(out: Path, note: str, command: str) -> None:
    """Check that ``out`` is new or empty, or holds ``note``, a file that ``command`` writes."""
    if not out.exists() or (out / note).is_file():
        return
    if not out.is_dir() or any(path.name != LOCK_FILE for path in out.iterdir()):
        best = out / SEARCH / BEST_FILE
        hint = f"Train its best recipe, {best}, or choose" if best.is_file() else "Choose"
        raise InputError(f"{out} was not written by prismlm {command}. {hint} another out.")


def check_new(out: Path, *, resume: bool) -> None:
    """Raise InputError if ``out`` holds something else, or a run and ``resume`` is not set."""
    check_ours(out, RUN_FILE, "train")
    if (out / RUN_FILE).is_file() and not resume:
        raise InputError(f"{out} holds a training run. Resume it with --resume, or remove it.")


def _check_trackers(recipe: Recipe) -> None:
    for name in recipe.logging.report_to:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"logging.report_to names {name!r}, which is not installed: pip install {name}."
            )


def result_settings(run: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in the result of :func:`describe_run` that affect results."""
    values = flat(run["recipe"]) | run["resolved"]
    values |= {"text": run["corpus"]["fingerprint"], "processes": run["processes"]}
    if values["parallel"] in SHARDED:
        # Any number of processes can read shards, and take as many rows together.
        values["batch_size · processes"] = values.pop("batch_size") * values.pop("processes")
    return {k: v for k, v in values.items() if k not in FREE_TO_CHANGE and v is not None}


def _begin(prepared: Prepared) -> None:
    """Store the settings of the run, or check that they are those of the run to resume."""
    out, now = prepared.recipe.out, describe_run(prepared.recipe, prepared.corpus)
    parameters = sum(p.numel() for p in prepared.model.parameters())
    check_room(f"a checkpoint in {out}", out, BYTES_PER_PARAMETER * parameters)
    if not (out / RUN_FILE).is_file():
        keep_json(out / RUN_FILE, now)
        return
    before = result_settings(read_json(out / RUN_FILE))
    way_out = "Restore these settings, or train into another out."
    check_same(f"{out} was begun with another recipe", before, result_settings(now), way_out)


def _take_steps(trainer: PrismTrainer, progress: Reporter) -> None:
    """Train to the end, from the newest checkpoint or from the start."""
    recipe = trainer.prepared.recipe
    checkpoint = parallel.on_main(lambda: latest_checkpoint(trainer.checkpoints))
    done = 0 if checkpoint is None else step_of(checkpoint)
    if checkpoint is not None and done >= recipe.steps:
        # Trainer would take another step before it stops.
        trainer.load_finished(checkpoint)
        return
    if parallel.is_main() and recipe.logging.tensorboard:
        trainer.add_callback(_tensorboard(recipe.out / TENSORBOARD, done))

    def message() -> str:
        return f"training stopped. {last_good(trainer.checkpoints)} Continue with --resume."

    # When a process fails, torchrun sends SIGTERM to the others, which must not wait for it.
    signals = tuple(EXIT_CODES) if parallel.world_size() == 1 else (signal.SIGINT,)
    positions = (recipe.steps - done) * recipe.positions_per_step * parallel.world_size()
    shown = (progress if parallel.is_main() else SILENT).task("training", positions)
    with Interrupts(message, signals) as trainer.interrupts, shown as trainer.task:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


def _measure(trainer: PrismTrainer, progress: Reporter) -> HeadQuality:
    """Return the figures of the final model on held-out text."""
    corpus, heldout = trainer.prepared.corpus, trainer.prepared.heldout
    tokens = trainer.prepared.recipe.evaluation.final_tokens
    available = int(corpus.lengths[corpus.split("heldout")].sum())
    with progress.task("measuring quality", min(tokens, available)) as task:
        return trainer.measure(heldout.counted(tokens, task))


def _write(trainer: PrismTrainer, quality: HeadQuality, history: list[dict[str, Any]]) -> None:
    """Write the finished model, ``prismlm.json`` last to mark it as complete."""
    provenance = trainer.provenance() | {"quality": quality.to_dict()}
    trainer.check_weights()
    with guard_writing("the model", trainer.checkpoints):
        if parallel.is_main():
            write_history(trainer.directory, history)
        trainer.write_model(trainer.directory, provenance)
        parallel.barrier()


def _tensorboard(directory: Path, first_step: int) -> TrainerCallback:
    """Return a TensorBoard callback; a resumed run replaces what it repeats."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(directory), purge_step=first_step or None))


def estimate(recipe: Recipe, *, resume: bool = False) -> Cost:
    """Estimate the cost of a run, without evaluations, from a few real steps; write nothing."""
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
        trainer = PrismTrainer(prepared, Path(name))
        trainer.task = clock
        trainer.train()
        files = (Path(name) / CHECKPOINTS).rglob("*")
        checkpoint = sum(path.stat().st_size for path in files if path.is_file())
    per_step = statistics.median(after - before for before, after in pairwise(clock.times))
    recipe = with_steps(recipe, prepared.rows)
    model = prepared.model
    parameters = sum(p.numel() for p in model.model.parameters())
    head = sum(p.numel() for p in model.prototype_head.parameters()) * recipe.head.enabled
    checkpoints = min(recipe.checkpoint.keep, -(-recipe.steps // recipe.checkpoint.every))
    figures = {
        "parameters": parameters,
        "head_parameters": head,
        "steps": recipe.steps,
        "seconds_per_step": per_step,
        "tokens": recipe.steps * recipe.positions_per_step,
        "device": str(trainer.args.device),
    }
    return Cost(
        per_step * recipe.steps,
        peak_memory(device_of(recipe)),
        checkpoints * checkpoint + 4 * (parameters + head),
        figures,
        basis=f"Measured on {MEASURED_STEPS} real steps.",
    )


class _Clock(Task):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def advance(self, amount: int = 1) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
