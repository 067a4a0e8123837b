"""Training from a recipe to a finished model directory: the whole way of a run, in order."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from prismlm.errors import DivergenceError, InputError, Interrupted, NotFiniteError, changes
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
from prismlm.run_state import EXIT_CODES, LOCK_FILE, Interrupts, writing
from prismlm.training import checkpoints, parallel
from prismlm.training.checkpoints import CHECKPOINTS
from prismlm.training.evaluation import perplexity, unigram_ce, verdict
from prismlm.training.layer_logs import layer_logs, write_heads_report
from prismlm.training.recipe import Recipe
from prismlm.training.recipe_file import flat
from prismlm.training.setup import Prepared, described, prepare
from prismlm.training.trainer import REMEDY, PrismTrainer

RUN_FILE = "training.json"
HISTORY_FILE = "training.jsonl"
TENSORBOARD = "tensorboard"
# Where a search for hyper-parameters keeps what it does, and the recipe it ends with.
SEARCH = "search"
BEST_FILE = "best.yaml"
# What may differ when a run is resumed: it changes neither weights nor figures.
FREE_TO_CHANGE = (
    "corpus",
    "out",
    "checkpoint.every",
    "checkpoint.keep",
    "logging.tensorboard",
    "logging.report_to",
)


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
        recipe, parameters = prepared.recipe, prepared.model.parameters()
        needed = checkpoints.BYTES_PER_PARAMETER * sum(p.numel() for p in parameters)
        check_room(f"a checkpoint in {out}", out, needed)
        parallel.on_main(lambda: _begin(prepared, resume))
        if on_warning is not None and (warning := prepared.warning()):
            on_warning(warning)
        trainer = PrismTrainer(prepared, out)
        checkpoint = parallel.on_main(lambda: checkpoints.latest_checkpoint(out / CHECKPOINTS))
        done = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
        logs = layer_logs(trainer, out, TENSORBOARD, done)
        with _reporting_divergence(trainer):
            _take_steps(trainer, logs, checkpoint, progress)
            quality = _measure(trainer, progress)
        for log in logs:
            log.add(step=trainer.state.global_step, ce=quality.ce, ce_tokens=quality.tokens)
        write_heads_report(trainer, out)
        tokens = trainer.tokens_seen()
        _finish(trainer, quality, tokens)
    return TrainingResult(
        directory=out,
        history_file=out / HISTORY_FILE,
        ce=quality.ce,
        quality=quality if recipe.head.enabled else None,
        history=trainer.state.log_history,
        steps=trainer.state.global_step,
        tokens=tokens,
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


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what changes results between two runs, of :func:`described`, as ``key: old → new``."""

    def compared(run: dict[str, Any]) -> dict[str, Any]:
        values = flat(run["recipe"]) | run["resolved"]
        values |= {"text": run["corpus"]["fingerprint"], "processes": run["processes"]}
        return {k: v for k, v in values.items() if k not in FREE_TO_CHANGE and v is not None}

    return changes(compared(before), compared(now))


def _begin(prepared: Prepared, resume: bool) -> None:
    """Note what the run is; raise InputError if another was noted, naming what differs."""
    out, now = prepared.recipe.out, described(prepared.recipe, prepared.corpus)
    check_new(out, resume=resume)
    if not (out / RUN_FILE).is_file():
        keep_json(out / RUN_FILE, now)
    elif changed := differences(read_json(out / RUN_FILE), now):
        raise InputError(
            f"{out} was begun with another recipe ({'; '.join(changed)}), so it cannot be resumed "
            "with this one. Put these settings back, or train into another out."
        )


@contextmanager
def _reporting_divergence(trainer: PrismTrainer) -> Iterator[None]:
    """Report figures that are not finite as training that diverged."""
    try:
        yield
    except NotFiniteError as error:
        newest = checkpoints.last_good(trainer.prepared.recipe.out / CHECKPOINTS)
        raise DivergenceError(
            f"a figure is not finite after step {trainer.state.global_step}: {error} {newest} "
            f"{REMEDY}"
        ) from error


def _take_steps(
    trainer: PrismTrainer,
    callbacks: list[Any],
    checkpoint: Path | None,
    progress: Reporter,
) -> None:
    """Train from a checkpoint, or from the start, to the end."""
    recipe, out = trainer.prepared.recipe, trainer.prepared.recipe.out
    done = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
    positions = recipe.positions_per_step * parallel.world_size()
    # torchrun ends the other processes of a failed one with SIGTERM: they would wait for it.
    signals = tuple(EXIT_CODES) if parallel.world_size() == 1 else (signal.SIGINT,)
    stop = StopOnInterrupt(Interrupts(lambda: "training stopped", signals))
    with stop.interrupts, progress.task("training", (recipe.steps - done) * positions) as task:
        if parallel.is_main():
            trainer.add_callback(ReportProgress(task, positions, out))
            if recipe.logging.tensorboard:
                trainer.add_callback(_tensorboard(out / TENSORBOARD, done))
        for callback in [*callbacks, stop]:
            trainer.add_callback(callback)
        if checkpoint is not None and done >= recipe.steps:
            # Trainer would run one more step before it noticed that it is finished.
            trainer.load_checkpoint(checkpoint)
        else:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            trainer.check_finite()
        if stop.interrupted:
            newest = checkpoints.latest_checkpoint(out / CHECKPOINTS)
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


def _finish(trainer: PrismTrainer, quality: HeadQuality, tokens: int) -> None:
    """Put the finished model into ``out``; ``prismlm.json`` last, so that it says it is whole."""
    prepared, state = trainer.prepared, trainer.state
    recipe, out = prepared.recipe, prepared.recipe.out
    provenance = prepared.provenance(steps=state.global_step, tokens=tokens)
    figures = quality.to_dict()
    provenance["quality"] = figures if recipe.head.enabled else {"ce": quality.ce}
    checkpoints.check_weights_finite(prepared.model, state.global_step, out / CHECKPOINTS)
    needed = 4 * sum(p.numel() for p in prepared.model.parameters())
    hidden = temporary_sibling(out / "model")
    with checkpoints.guard_writing(f"the model in {out}", out / CHECKPOINTS, needed):
        try:
            trainer.write_model(hidden, provenance)
            if parallel.is_main():
                if not recipe.head.enabled:
                    # A plain model's directory is a plain checkpoint.
                    for name in (META_FILE, HEAD_FILE):
                        (hidden / name).unlink()
                for path in sorted(hidden.iterdir(), key=lambda path: path.name == META_FILE):
                    os.replace(path, out / path.name)
                write_history(out, state.log_history)
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


@dataclass(eq=False)
class StopOnInterrupt(TrainerCallback):
    """Ends training after the current step, with a checkpoint, once a signal came.

    A second one ends it at once; the newest checkpoint on disk stays as it is.
    """

    interrupts: Interrupts
    interrupted: bool = False

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint and the end, in every process at the same step."""
        self.interrupted = parallel.any_process(self.interrupts.received is not None)
        if self.interrupted:
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True


class ReportProgress(TrainerCallback):
    """Advances a task with each step, and writes the history with each checkpoint."""

    def __init__(self, task: Task, positions_per_step: int, out: Path) -> None:
        self._task, self._positions, self._out = task, positions_per_step, out
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
        with checkpoints.guard_writing(f"the history in {self._out}", self._out / CHECKPOINTS):
            write_history(self._out, state.log_history)


def _tensorboard(directory: Path, first_step: int) -> TrainerCallback:
    """Return a callback that writes TensorBoard files, dropping what a resumed run does again."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(directory), purge_step=first_step or None))
