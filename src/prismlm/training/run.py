"""Training from a recipe to a finished model directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from prismlm.errors import InputError
from prismlm.files import atomic_file, read_json, write_json
from prismlm.lens.quality import HeadQuality, measure_quality
from prismlm.models.quiet import quiet_transformers
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import META_FILE
from prismlm.progress import SILENT, Reporter
from prismlm.training import checkpoints, distributed, parallel
from prismlm.training.callbacks import ReportProgress, StopOnInterrupt, tensorboard_callback
from prismlm.training.recipe import Recipe
from prismlm.training.setup import CHECKPOINTS, Prepared, build_trainer, prepare
from prismlm.training.trainer import PrismTrainer

RUN_FILE = "training.json"
HISTORY_FILE = "training.jsonl"
TENSORBOARD = "tensorboard"
# What may differ when a run is resumed: it changes neither weights nor figures.
FREE_TO_CHANGE = ("corpus", "out", "checkpoint.every", "checkpoint.keep", "logging.tensorboard")


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C ended training after a whole step.

    Attributes:
        checkpoint: what ``resume`` goes on from.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"training stopped; its state is in {checkpoint}")
        self.checkpoint = checkpoint


@dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    Attributes:
        directory: the model directory.
        history_file: one JSON object per log and evaluation.
        quality: the figures of the head on held-out text.
        history: the same as in ``history_file``.
        steps: optimizer steps.
        tokens: tokens trained on, padding left out.
    """

    directory: Path
    history_file: Path
    quality: HeadQuality
    history: list[dict[str, Any]]
    steps: int
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, without the history."""
        return {
            "model": str(self.directory),
            "history": str(self.history_file),
            "steps": self.steps,
            "tokens": self.tokens,
            "quality": self.quality.to_dict(),
        }


def train(recipe: Recipe, *, resume: bool = False, progress: Reporter = SILENT) -> TrainingResult:
    """Train a model and its prototypes; write the model directory ``recipe.out``.

    Checkpoints go to ``out/checkpoints``, each a model directory; the finished model is put into
    ``out`` itself with ``training.jsonl``, the history. On Ctrl-C the current step is finished
    and a checkpoint written.

    Args:
        recipe: see :class:`Recipe`.
        resume: go on from the newest complete checkpoint in ``out``, or start if there is none.
        progress: shows training and the measurement at the end.

    Raises:
        InputError: the corpus does not fit, ``out`` holds something else, or the recipe is not
            the one that ``out`` was begun with.
        PrismError: the loss or a gradient became infinite or not a number.
        TrainingInterrupted: Ctrl-C was pressed.
    """
    distributed.join()
    distributed.on_main(lambda: check_out(recipe, resume=resume))
    prepared = prepare(recipe)
    distributed.on_main(lambda: _begin(prepared))
    stop = StopOnInterrupt()
    with quiet_transformers():
        trainer = _train(prepared, stop, progress)
        quality = _final_quality(prepared, progress)
        _finish(prepared, trainer, quality)
    return TrainingResult(
        directory=recipe.out,
        history_file=recipe.out / HISTORY_FILE,
        quality=quality,
        history=trainer.state.log_history,
        steps=trainer.state.global_step,
        tokens=trainer.meter.tokens,
    )


def check_out(recipe: Recipe, *, resume: bool) -> None:
    """Check that ``recipe.out`` may be written to.

    Raises:
        InputError: it holds something else, a run that ``resume`` was not asked for, or a run of
            another recipe.
    """
    out = recipe.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / RUN_FILE).is_file():
        raise InputError(
            f"{out} exists and was not written by prismlm train. Choose another out, or remove it."
        )
    if not resume:
        raise InputError(
            f"{out} holds a training run. Go on with it with --resume, choose another out, or "
            "remove it."
        )
    before = _flat(read_json(out / RUN_FILE)["recipe"])
    now = _flat(recipe.to_dict())
    changed = [
        f"{key}: {_shown(before, key)} → {_shown(now, key)}"
        for key in sorted(before | now)
        if key not in FREE_TO_CHANGE and before.get(key) != now.get(key)
    ]
    if changed:
        raise InputError(
            f"{out} was begun with another recipe ({'; '.join(changed)}), so it cannot be resumed "
            "with this one. Put these settings back, or train into another out."
        )


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "not set"


def _begin(prepared: Prepared) -> None:
    """Note what the run is, or check that it is the one that was noted."""
    out = prepared.recipe.out
    corpus = {"name": prepared.corpus.name, "fingerprint": prepared.corpus.fingerprint}
    processes = distributed.world_size()
    if (out / RUN_FILE).is_file():
        noted = read_json(out / RUN_FILE)
        if noted.get("processes", 1) != processes:
            raise InputError(
                f"{out} was begun with {noted.get('processes', 1)} processes, and these are "
                f"{processes}: their steps would hold other rows. Start as many as before, or "
                "train into another out."
            )
        if noted["corpus"]["fingerprint"] != corpus["fingerprint"]:
            raise InputError(
                f"{out} was begun with another corpus than {prepared.corpus.path}. Give the same "
                "corpus, or train into another out."
            )
    else:
        run = {"recipe": prepared.recipe.to_dict(), "corpus": corpus, "processes": processes}
        write_json(out / RUN_FILE, run)
    checkpoints.clean(out / CHECKPOINTS)


def _train(prepared: Prepared, stop: StopOnInterrupt, progress: Reporter) -> PrismTrainer:
    recipe, out = prepared.recipe, prepared.recipe.out
    checkpoint = checkpoints.latest_checkpoint(out / CHECKPOINTS)
    done = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
    positions = recipe.positions_per_step * distributed.world_size()
    left = (recipe.steps - done) * positions
    with stop.listening(), progress.task("training", left, "tokens") as task:
        callbacks: list[TrainerCallback] = [stop]
        if distributed.is_main():
            callbacks = [ReportProgress(task, positions), _History(out), stop]
            if recipe.logging.tensorboard:
                callbacks.insert(1, tensorboard_callback(out / TENSORBOARD, done))
        trainer = build_trainer(prepared, out, callbacks)
        if checkpoint is not None and done >= recipe.steps:
            # Trainer would run one more step before it noticed that it is finished.
            trainer._load_from_checkpoint(str(checkpoint))
            state = checkpoint / "trainer_state.json"
            trainer.state = TrainerState.load_from_json(str(state))
        else:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if stop.interrupted:
            newest = checkpoints.latest_checkpoint(out / CHECKPOINTS)
            assert newest is not None
            raise TrainingInterrupted(newest)
    return trainer


def _final_quality(prepared: Prepared, progress: Reporter) -> HeadQuality:
    tokens = prepared.recipe.evaluation.final_tokens
    model = prepared.model.model
    with progress.task("measuring quality", None, "tokens") as task:

        def counted() -> Iterator[Any]:
            for batch in prepared.heldout.batches(tokens):
                yield batch
                task.advance(int(batch.owned.sum()))

        head = prepared.model.prototype_head
        with parallel.whole(model):
            return measure_quality(model, head, LogitMap.of(model), counted())


def _finish(prepared: Prepared, trainer: PrismTrainer, quality: HeadQuality) -> None:
    """Put the finished model into ``out``; ``prismlm.json`` last, so that it says it is whole."""
    out = prepared.recipe.out
    state = trainer.state
    provenance = prepared.provenance(steps=state.global_step, tokens=trainer.meter.tokens)
    provenance["quality"] = quality.to_dict()
    hidden = out / ".model.tmp"
    main = distributed.is_main()
    if main:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
    try:
        trainer.write_model(hidden, provenance)
        if main:
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
        lines = [json.dumps(row, allow_nan=False) for row in history]
        temporary.write_text("\n".join([*lines, ""]), encoding="utf-8")


class _History(TrainerCallback):
    """Writes the history with every checkpoint, for whoever watches."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        write_history(self._out, state.log_history)
