"""Training from a recipe to a finished model directory."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from prismlm.errors import DivergenceError, Interrupted, NotFiniteError
from prismlm.explain.quality import HeadQuality
from prismlm.files import atomic_file, check_room, json_text, temporary_sibling
from prismlm.models.checkpoint import quiet_transformers
from prismlm.models.sidecar import HEAD_FILE, META_FILE
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import EXIT_CODES, Interrupts
from prismlm.training import checkpoints, distributed
from prismlm.training.callbacks import ReportProgress, StopOnInterrupt, tensorboard_callback
from prismlm.training.evaluation import perplexity
from prismlm.training.logs.channels import channels_log
from prismlm.training.logs.heads import heads_log, write_heads_report
from prismlm.training.logs.layers import LayerLog
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import (
    begin,
    check_run_directory,
    checkpoint_to_resume,
    exclusive,
)
from prismlm.training.setup import CHECKPOINTS, TENSORBOARD, Prepared, build_trainer, prepare
from prismlm.training.trainer import REMEDY, PrismTrainer
from prismlm.training.verdict import many_passes, unigram_ce, verdict

HISTORY_FILE = "training.jsonl"


class TrainingInterrupted(Interrupted):
    """A signal ended training after a whole step.

    Attributes:
        checkpoint: what ``resume`` goes on from.
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

    Checkpoints go to ``out/checkpoints``, each a model directory; the finished model is put into
    ``out`` itself with ``training.jsonl``, the history. On Ctrl-C the current step is finished
    and a checkpoint written.

    Args:
        recipe: see :class:`Recipe`.
        resume: go on from the newest complete checkpoint in ``out``, or start if there is none.
        progress: shows training and the measurement at the end.
        on_warning: is told, before the first step, what bodes ill: many passes over few documents.

    Raises:
        InputError: the device is not there, the corpus does not fit, ``out`` holds something
            else or is being written to, or the recipe is not the one that it was begun with.
        FormatError: the newest checkpoint is damaged.
        DivergenceError: the loss, a gradient or a weight became infinite or not a number.
        PrismError: the disk is full. Like the last, it names the checkpoint that is left.
        TrainingInterrupted: SIGINT or SIGTERM came.
    """
    distributed.join()
    # torchrun ends the other processes of a failed one with SIGTERM: they would wait for it.
    alone = distributed.world_size() == 1
    numbers = tuple(EXIT_CODES) if alone else (signal.SIGINT,)
    stop = StopOnInterrupt(Interrupts(lambda: "training stopped", numbers))
    with ExitStack() as held, quiet_transformers():
        distributed.on_main(lambda: held.enter_context(exclusive(recipe.out)))
        distributed.on_main(lambda: check_run_directory(recipe, resume=resume))
        prepared = prepare(recipe)
        parameters = sum(p.numel() for p in prepared.model.parameters())
        expected = checkpoints.BYTES_PER_PARAMETER * parameters
        check_room(f"a checkpoint in {recipe.out}", recipe.out, expected)
        distributed.on_main(lambda: begin(prepared))
        if on_warning is not None and (warning := many_passes(prepared)):
            on_warning(warning)
        trainer, logs = _train(prepared, stop, progress)
        quality = _measured(prepared, trainer, progress)
        for log in logs:
            step, ce, ce_tokens = trainer.state.global_step, quality.ce, quality.tokens
            log.add(prepared.model.model, step=step, ce=ce, ce_tokens=ce_tokens)
            log.close()
        write_heads_report(prepared)
        _finish(prepared, trainer, quality)
    return TrainingResult(
        directory=recipe.out,
        history_file=recipe.out / HISTORY_FILE,
        ce=quality.ce,
        quality=quality if recipe.head.enabled else None,
        history=trainer.state.log_history,
        steps=trainer.state.global_step,
        tokens=trainer.meter.tokens,
        unigram_ce=unigram_ce(prepared.corpus),
    )


def _measured(prepared: Prepared, trainer: PrismTrainer, progress: Reporter) -> HeadQuality:
    """Return the figures of the model at the end, on held-out text."""
    recipe, corpus = prepared.recipe, prepared.corpus
    tokens = recipe.evaluation.final_tokens
    there = int(corpus.lengths[corpus.split("heldout")].sum())
    shown = progress.task("measuring quality", min(tokens, there), "tokens")
    with _reporting_divergence(trainer, recipe.out), shown as task:
        return trainer.measure(prepared.heldout.counted(tokens, task))


def _train(
    prepared: Prepared, stop: StopOnInterrupt, progress: Reporter
) -> tuple[PrismTrainer, list[LayerLog]]:
    recipe, out = prepared.recipe, prepared.recipe.out
    checkpoint = distributed.on_main(lambda: checkpoint_to_resume(prepared))
    done = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
    positions = recipe.positions_per_step * distributed.world_size()
    left = (recipe.steps - done) * positions
    with stop.interrupts, progress.task("training", left, "tokens") as task:
        callbacks: list[TrainerCallback] = [stop]
        if distributed.is_main():
            callbacks = [ReportProgress(task, positions), _History(out), stop]
            if recipe.logging.tensorboard:
                callbacks.insert(1, tensorboard_callback(out / TENSORBOARD, done))
        trainer = build_trainer(prepared, out, callbacks)
        both = (channels_log(prepared, done, trainer), heads_log(prepared, done, trainer))
        logs = [log for log in both if log is not None]
        for log in logs:
            trainer.add_callback(log)
        if checkpoint is not None and done >= recipe.steps:
            # Trainer would run one more step before it noticed that it is finished.
            trainer._load_from_checkpoint(str(checkpoint))
            state = checkpoint / "trainer_state.json"
            trainer.state = TrainerState.load_from_json(str(state))
            if distributed.is_main():
                # A kill right after the last checkpoint left one that was to go.
                checkpoints.keep_newest(out / CHECKPOINTS, recipe.checkpoint.keep)
        else:
            with _reporting_divergence(trainer, out):
                begun = None if checkpoint is None else str(checkpoint)
                trainer.train(resume_from_checkpoint=begun)
        if stop.interrupted:
            newest = checkpoints.latest_checkpoint(out / CHECKPOINTS)
            assert newest is not None
            code = EXIT_CODES[stop.interrupts.received or signal.SIGINT]
            raise TrainingInterrupted(newest, code)
    return trainer, logs


@contextmanager
def _reporting_divergence(trainer: PrismTrainer, out: Path) -> Iterator[None]:
    """Report figures that are not finite, of which no loss comes, as other losses that are not."""
    try:
        yield
    except NotFiniteError as error:
        raise DivergenceError(
            f"a figure is not finite after step {trainer.state.global_step}: {error} "
            f"{checkpoints.last_good(out / CHECKPOINTS)} {REMEDY}"
        ) from error


def _finish(prepared: Prepared, trainer: PrismTrainer, quality: HeadQuality) -> None:
    """Put the finished model into ``out``; ``prismlm.json`` last, so that it says it is whole."""
    recipe, out, state = prepared.recipe, prepared.recipe.out, trainer.state
    provenance = prepared.provenance(steps=state.global_step, tokens=trainer.meter.tokens)
    figures = quality.to_dict()
    provenance["quality"] = figures if recipe.head.enabled else {"ce": quality.ce}
    checkpoints.check_weights_finite(prepared.model, state.global_step, out / CHECKPOINTS)
    needed = 4 * sum(p.numel() for p in prepared.model.parameters())
    hidden, main = temporary_sibling(out / "model"), distributed.is_main()
    with checkpoints.guard_writing(f"the model in {out}", out / CHECKPOINTS, needed):
        if main:
            hidden.mkdir()
        try:
            trainer.write_model(hidden, provenance)
            if main:
                if not recipe.head.enabled:
                    # A plain model's directory is a plain checkpoint.
                    for name in (META_FILE, HEAD_FILE):
                        (hidden / name).unlink()
                for path in sorted(hidden.iterdir(), key=lambda path: path.name == META_FILE):
                    os.replace(path, out / path.name)
                write_history(out, state.log_history)
        finally:
            if main:
                shutil.rmtree(hidden, ignore_errors=True)
        distributed.barrier()


def write_history(out: Path, history: list[dict[str, Any]]) -> None:
    """Write one JSON object per line, atomically."""
    with atomic_file(out / HISTORY_FILE) as temporary:
        # What a checkpoint gave back has its keys in their order.
        lines = [json_text(row, sort_keys=True) for row in history]
        temporary.write_text("\n".join([*lines, ""]), encoding="utf-8")


class _History(TrainerCallback):
    """Writes the history with every checkpoint, for whoever watches."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        with checkpoints.guard_writing(f"the history in {self._out}", self._out / CHECKPOINTS):
            write_history(self._out, state.log_history)
