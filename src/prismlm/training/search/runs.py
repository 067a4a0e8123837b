"""One trial of a search: its runs, each of which is done once, however often it is interrupted."""

from __future__ import annotations

import math
import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import torch

from prismlm.errors import DivergenceError, FormatError, InputError
from prismlm.files import read_json, write_json
from prismlm.progress import SILENT, Reporter, Task
from prismlm.training.dimensions import Scalar
from prismlm.training.logs.channels import CHANNELS_FILE
from prismlm.training.logs.heads import HEADS_FILE, REPORT_FILE
from prismlm.training.recipe import Recipe
from prismlm.training.run import HISTORY_FILE, TrainingResult, train
from prismlm.training.run_directory import RUN_FILE
from prismlm.training.search.result import SeedOutcome, TrialResult
from prismlm.training.search.space import recipe_of
from prismlm.training.setup import TENSORBOARD

TRIALS = "trials"
OUTCOME_FILE = "outcome.json"
KEPT = (
    OUTCOME_FILE,
    RUN_FILE,
    HISTORY_FILE,
    CHANNELS_FILE,
    HEADS_FILE,
    REPORT_FILE,
    TENSORBOARD,
)


def run_trial(
    recipe: Recipe, number: int, values: dict[str, Scalar], directory: Path, progress: Reporter
) -> TrialResult:
    """Train a trial's models, one for each seed until one fails, and measure them.

    A run that was finished is not done again; one that was cut short goes on from its checkpoint.
    Of each run the history is kept and the model is not.

    Raises:
        InputError: the values cannot be trained with at all.
        TrainingInterrupted: Ctrl-C was pressed.
    """
    outcomes: list[SeedOutcome] = []
    search = recipe.search
    for place in range(search.seeds):
        seed = recipe.seed + place
        out = directory / TRIALS / f"{number:04d}" / f"seed-{seed}"
        name = f"trial {number}, seed {seed}"
        try:
            run = recipe_of(recipe, values, seed=seed, out=out)
            outcomes.append(_run(run, _Named(progress, name)))
        except InputError as error:
            shown = ", ".join(f"{key} {value}" for key, value in values.items())
            raise InputError(f"trial {number} ({shown}) cannot be run: {error}") from error
        if outcomes[-1].ce is None:
            break
    return TrialResult(number, values, tuple(outcomes))


def _run(recipe: Recipe, progress: Reporter) -> SeedOutcome:
    file = recipe.out / OUTCOME_FILE
    if file.is_file():
        outcome = SeedOutcome(**read_json(file))
    else:
        outcome = _outcome(recipe, progress)
        recipe.out.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(outcome))
    for path in recipe.out.iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return outcome


def _outcome(recipe: Recipe, progress: Reporter) -> SeedOutcome:
    try:
        result = _trained(recipe, progress)
    except (DivergenceError, torch.OutOfMemoryError) as error:
        return SeedOutcome(recipe.seed, None, failed=_first_sentence(error))
    if not math.isfinite(result.ce):
        return SeedOutcome(recipe.seed, None, failed=f"the held-out cross-entropy is {result.ce}")
    return SeedOutcome(recipe.seed, result.ce, result.steps, result.tokens)


def _trained(recipe: Recipe, progress: Reporter) -> TrainingResult:
    try:
        return train(recipe, resume=True, progress=progress)
    except FormatError:
        # A checkpoint that cannot be gone on from; a damaged corpus fails again.
        shutil.rmtree(recipe.out, ignore_errors=True)
        return train(recipe, resume=True, progress=progress)


def _first_sentence(error: Exception) -> str:
    text = str(error).split("\n", maxsplit=1)[0]
    return text.split(". ", maxsplit=1)[0].rstrip(".")


class _Named:
    """Shows the training of one run under the name of its trial, and no other task."""

    def __init__(self, inner: Reporter, name: str) -> None:
        self._inner = inner
        self._name = name

    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> AbstractContextManager[Task]:
        """Open a task."""
        shown = self._inner if description == "training" else SILENT
        return shown.task(self._name, total, unit)
