"""Training from a recipe to a finished model directory, and what that would take."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from prismlm.cost import Cost, peak_memory
from prismlm.errors import InputError, Interrupted, NotFiniteError
from prismlm.explain.quality import HeadQuality
from prismlm.files import (
    atomic_file,
    check_room,
    json_text,
    keep_json,
    read_json,
    temporary_sibling,
)
from prismlm.models.checkpoint import quiet_transformers
from prismlm.models.sidecar import HEAD_FILE, META_FILE
from prismlm.progress import SILENT, Reporter, Task
from prismlm.run_state import EXIT_CODES, LOCK_FILE, Interrupts, check_same, writing
from prismlm.training import parallel
from prismlm.training.evaluation import perplexity, unigram_ce, verdict
from prismlm.training.recipe import Recipe
from prismlm.training.recipe_file import flat
from prismlm.training.setup import Prepared, described, device_of, prepare, resolved, with_steps
from prismlm.training.trainer import (
    BYTES_PER_PARAMETER,
    CHECKPOINTS,
    PrismTrainer,
    check_weights_finite,
    guard_writing,
    latest_checkpoint,
    step_of,
)

RUN_FILE, HISTORY_FILE, TENSORBOARD = "training.json", "training.jsonl", "tensorboard"
# Where a search for hyper-parameters keeps what it does, and the recipe it ends with.
SEARCH, BEST_FILE = "search", "best.yaml"
# What may differ when a run is resumed: it changes neither weights nor figures.
FREE_TO_CHANGE = (
    "corpus",
    "out",
    "checkpoint.every",
    "checkpoint.keep",
    "logging.tensorboard",
    "logging.report_to",
)
MEASURED_STEPS = 3


class TrainingInterrupted(Interrupted):
    """A signal ended training after a whole step.

    Attributes:
        checkpoint: what ``resume`` starts from.
    """

    def __init__(self, checkpoint: Path, exit_code: int = 130) -> None:
        super().__init__(f"training stopped; its state is in {checkpoint}", exit_code)
        self.checkpoint = checkpoint


@dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    Attributes:
        directory: the model directory.
        history_file: one JSON object per log and evaluation.
        ce: cross-entropy of the model on held-out text, in nats per token.
        quality: the figures of the head on held-out text; None for a plain model.
        history: the same as in ``history_file``.
        steps: optimizer steps.
        tokens: tokens trained on, padding left out.
        unigram_ce: what guessing by the frequency of tokens has there.
    """

    directory: Path
    history_file: Path
    ce: float
    quality: HeadQuality | None
    history: list[dict[str, Any]]
    steps: int
    tokens: int
    unigram_ce: float

    @property
    def verdict(self) -> str:
        """What the cross-entropy says, in words."""
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
    progress: Reporter = SILENT,
    on_warning: Callable[[str], object] | None = None,
) -> TrainingResult:
    """Train a model and its prototypes; write the model directory ``recipe.out``.

    Checkpoints, each a model directory, go to ``out/checkpoints``. On Ctrl-C the current step is
    finished and a checkpoint written.

    Args:
        recipe: see :class:`Recipe`.
        resume: start from the newest complete checkpoint in ``out``, or anew if there is none.
        progress: shows training and the measurement at the end.
        on_warning: called before the first step with what bodes ill, such as many passes over few
            documents.

    Raises:
        InputError: the device is not there, the corpus does not fit, ``out`` holds something
            else or is being written to, or the recipe is not the one that it was begun with.
        FormatError: the newest checkpoint is damaged.
        DivergenceError: the loss, a gradient or a weight became infinite or not a number.
        PrismError: the disk is full. Like the last, it names the checkpoint that is left.
        TrainingInterrupted: SIGINT or SIGTERM came.
    """
    parallel.join()
    out = recipe.out
    with ExitStack() as stack, quiet_transformers():
        parallel.on_main(lambda: check_new(out, resume=resume))
        _check_reporters(recipe)
        parallel.on_main(lambda: stack.enter_context(writing(out, within=True)))
        prepared = prepare(recipe)
        parallel.on_main(lambda: _begin(prepared, resume))
        if on_warning is not None and (warning := prepared.warning()):
            on_warning(warning)
        trainer = PrismTrainer(prepared, out)
        try:
            _take_steps(trainer, progress)
            quality = _measure(trainer, progress)
            # The last evaluation is on more text than those before it, so it is not compared.
            last: dict[str, Any] = {"step": trainer.state.global_step, "epoch": trainer.state.epoch}
            last |= {"eval_ce": quality.ce, "eval_tokens": quality.tokens}
            last |= trainer.layer_log.figures()
        except NotFiniteError as error:
            raise trainer.diverged(str(error)) from error
        _write(trainer, quality, [*trainer.state.log_history, last])
    return TrainingResult(
        directory=out,
        history_file=out / HISTORY_FILE,
        ce=quality.ce,
        quality=quality if recipe.head.enabled else None,
        history=trainer.state.log_history,
        steps=trainer.state.global_step,
        tokens=trainer.tokens_seen(),
        unigram_ce=unigram_ce(prepared.corpus),
    )


def check_ours(out: Path, note: str, command: str) -> None:
    """Check that ``out`` is new, empty or a run of a command that left this note."""
    if not out.exists() or (out / note).is_file():
        return
    if (out / SEARCH).is_dir():
        raise InputError(
            f"{out} holds a search. Train its best recipe, {out / SEARCH / BEST_FILE}, or choose "
            "another out."
        )
    if not out.is_dir() or any(path.name != LOCK_FILE for path in out.iterdir()):
        raise InputError(
            f"{out} exists and was not written by prismlm {command}. Choose another out, or "
            "remove it."
        )


def check_new(out: Path, *, resume: bool) -> None:
    """Raise InputError if ``out`` holds something else, or a run that is not to be resumed."""
    check_ours(out, RUN_FILE, "train")
    if (out / RUN_FILE).is_file() and not resume:
        raise InputError(
            f"{out} holds a training run. Resume it with --resume, choose another out, or "
            "remove it."
        )


def _check_reporters(recipe: Recipe) -> None:
    for name in recipe.logging.report_to:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"logging.report_to has {name!r}, which is not installed: pip install {name}, or "
                "leave it out."
            )


def settings_of(run: dict[str, Any]) -> dict[str, Any]:
    """Return what of a run, as :func:`described` has it, changes its results."""
    values = flat(run["recipe"]) | run["resolved"]
    values |= {"text": run["corpus"]["fingerprint"], "processes": run["processes"]}
    return {k: v for k, v in values.items() if k not in FREE_TO_CHANGE and v is not None}


def _begin(prepared: Prepared, resume: bool) -> None:
    """Note what the run is; raise InputError if another was noted, naming what differs."""
    out, now = prepared.recipe.out, described(prepared.recipe, prepared.corpus)
    # Another process may have begun it while the corpus was read.
    check_new(out, resume=resume)
    parameters = sum(p.numel() for p in prepared.model.parameters())
    check_room(f"a checkpoint in {out}", out, BYTES_PER_PARAMETER * parameters)
    if not (out / RUN_FILE).is_file():
        keep_json(out / RUN_FILE, now)
        return
    before = settings_of(read_json(out / RUN_FILE))
    way_out = "Put these settings back, or train into another out."
    check_same(f"{out} was begun with another recipe", before, settings_of(now), way_out)


def _take_steps(trainer: PrismTrainer, progress: Reporter) -> None:
    """Train from the newest checkpoint, or from the start, to the end."""
    recipe, out = trainer.prepared.recipe, trainer.prepared.recipe.out
    checkpoint = parallel.on_main(lambda: latest_checkpoint(out / CHECKPOINTS))
    done = 0 if checkpoint is None else step_of(checkpoint)
    if checkpoint is not None and done >= recipe.steps:
        # Trainer would run one more step before it noticed that it is finished.
        trainer.load_finished(checkpoint)
        return
    positions = recipe.positions_per_step * parallel.world_size()
    # torchrun ends the other processes of a failed one with SIGTERM: they would wait for it.
    signals = tuple(EXIT_CODES) if parallel.world_size() == 1 else (signal.SIGINT,)
    stop = StopOnInterrupt(Interrupts(lambda: "training stopped", signals))
    with stop.interrupts, progress.task("training", (recipe.steps - done) * positions) as task:
        if parallel.is_main():
            trainer.add_callback(ReportProgress(trainer, task, positions, out))
            if recipe.logging.tensorboard:
                trainer.add_callback(_tensorboard(out / TENSORBOARD, done))
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if stop.interrupted:
            newest = latest_checkpoint(out / CHECKPOINTS)
            assert newest is not None
            code = EXIT_CODES[stop.interrupts.received or signal.SIGINT]
            raise TrainingInterrupted(newest, code)


def _measure(trainer: PrismTrainer, progress: Reporter) -> HeadQuality:
    """Return the figures of the model at the end, on held-out text."""
    corpus, heldout = trainer.prepared.corpus, trainer.prepared.heldout
    tokens = trainer.prepared.recipe.evaluation.final_tokens
    available = int(corpus.lengths[corpus.split("heldout")].sum())
    with progress.task("measuring quality", min(tokens, available)) as task:
        return trainer.measure(heldout.counted(tokens, task))


def _write(trainer: PrismTrainer, quality: HeadQuality, evaluations: list[dict[str, Any]]) -> None:
    """Put the finished model into ``out``; ``prismlm.json`` last, so that it says it is whole."""
    prepared, state = trainer.prepared, trainer.state
    recipe, out = prepared.recipe, prepared.recipe.out
    provenance = prepared.provenance(steps=state.global_step, tokens=trainer.tokens_seen())
    provenance["quality"] = quality.to_dict() if recipe.head.enabled else {"ce": quality.ce}
    check_weights_finite(prepared.model, state.global_step, out / CHECKPOINTS)
    needed = 4 * sum(p.numel() for p in prepared.model.parameters())
    hidden = temporary_sibling(out / "model")
    with guard_writing(f"the model in {out}", out / CHECKPOINTS, needed):
        trainer.layer_log.write_report(out)
        try:
            trainer.write_model(hidden, provenance)
            if parallel.is_main():
                if not recipe.head.enabled:
                    # A plain model's directory is a plain checkpoint.
                    for name in (META_FILE, HEAD_FILE):
                        (hidden / name).unlink()
                trainer.layer_log.write(out, evaluations)
                write_history(out, state.log_history)
                for path in sorted(hidden.iterdir(), key=lambda path: path.name == META_FILE):
                    os.replace(path, out / path.name)
        finally:
            if parallel.is_main():
                shutil.rmtree(hidden, ignore_errors=True)
        parallel.barrier()


def write_history(out: Path, history: list[dict[str, Any]]) -> None:
    """Write one JSON object per line, atomically."""
    with atomic_file(out / HISTORY_FILE) as temporary:
        # What a checkpoint gave back has its keys in their order.
        lines = [json_text(row, sort_keys=True) for row in history]
        temporary.write_text("\n".join([*lines, ""]), encoding="utf-8")


class StopOnInterrupt(TrainerCallback):
    """Ends training after the current step, with a checkpoint, once a signal came.

    A second one ends it at once; the newest checkpoint on disk stays as it is.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self.interrupts, self.interrupted = interrupts, False

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint and the end, in every process at the same step."""
        self.interrupted = parallel.any_process(self.interrupts.received is not None)
        if self.interrupted:
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True


class ReportProgress(TrainerCallback):
    """Advances a task with each step; writes history and layers' tables with each checkpoint."""

    def __init__(
        self, trainer: PrismTrainer, task: Task, positions_per_step: int, out: Path
    ) -> None:
        self._trainer, self._task = trainer, task
        self._positions, self._out = positions_per_step, out
        self._notes: dict[str, str] = {}

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Advance, and name the step."""
        self._notes["step"] = f"step {state.global_step}/{state.max_steps}"
        self._task.note(" · ".join(self._notes.values()))
        self._task.advance(self._positions)

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Take in the newest figures."""
        logs: dict[str, float] = kwargs.get("logs") or {}
        for key, label in (("ce", "CE"), ("eval_prototype_only_ce", "prototype-only")):
            if key in logs:
                self._notes[key] = f"{label} {logs[key]:.2f}"

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the history, for whoever watches."""
        with guard_writing(f"the history in {self._out}", self._out / CHECKPOINTS):
            write_history(self._out, state.log_history)
            self._trainer.layer_log.write(self._out, state.log_history)


def _tensorboard(directory: Path, first_step: int) -> TrainerCallback:
    """Return a callback that writes TensorBoard files, dropping what a resumed run does again."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(directory), purge_step=first_step or None))


def estimate(recipe: Recipe, *, resume: bool = False) -> Cost:
    """Say what the run will take, from a few real steps; nothing is written to ``out``.

    Evaluations are left out; disk is the finished model, and the checkpoints that are kept, with
    their optimizer. The figures are ``parameters`` of the model, ``head_parameters``; optimizer
    ``steps``; ``tokens``, positions that one process trains on; ``corpus_tokens`` in the training
    rows, ``passes`` over them and their share of ``padding``; ``precision``, ``device`` and
    ``seconds_per_step``.

    Raises:
        InputError: as :func:`train`.
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
