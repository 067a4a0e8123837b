"""Searching hyper-parameters: an Optuna study whose every trial is a mean over seeds."""

from __future__ import annotations

import csv
import math
import os
import shutil
import statistics
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml

from prismlm.corpus.store import Corpus
from prismlm.cost import Cost
from prismlm.errors import DivergenceError, FormatError, InputError, PrismError, changes
from prismlm.files import atomic_file, read_json, room_to_write, write_json
from prismlm.progress import SILENT, Reporter, Task
from prismlm.run_state import writing
from prismlm.training import parallel
from prismlm.training.estimate import estimate
from prismlm.training.evaluation import perplexity
from prismlm.training.layer_logs import CHANNELS_FILE, HEADS_FILE, REPORT_FILE
from prismlm.training.recipe import Dimension, Range, Recipe, Scalar, SearchRecipe
from prismlm.training.recipe_file import check_space, recipe_with, takes_whole_numbers
from prismlm.training.run import (
    BEST_FILE,
    HISTORY_FILE,
    RUN_FILE,
    SEARCH,
    TENSORBOARD,
    described,
    differences,
    train,
)
from prismlm.training.setup import prepare, versions

JOURNAL, STUDY = "study.journal", "prismlm"
PACKAGES = {"optuna": "optuna", "optuna_integration": "optuna-integration", "botorch": "botorch"}
RESULTS_FILE, TABLE_FILE, BEST_MODEL, TRIALS = "search.json", "search.csv", "best", "trials"
# What stays of a run when it is measured: its model does not.
KEPT = (RUN_FILE, HISTORY_FILE, CHANNELS_FILE, HEADS_FILE, REPORT_FILE, TENSORBOARD)
OF_THE_HEAD = ("head.", "losses.", "optimizer.head_")
OBJECTIVE = (
    "mean over the seeds of the cross-entropy on held-out text at the end of training, in nats per "
    "token; the less the better"
)


@dataclass(frozen=True)
class SeedOutcome:
    """One run of a trial.

    Attributes:
        seed: the run's.
        ce: cross-entropy on ``evaluation.final_tokens`` of held-out text at the end, in nats per
            token; None if the run failed.
        steps: optimizer steps, 0 if it failed.
        tokens: tokens trained on, padding left out, 0 if it failed.
        failed: why the run failed, or None.
    """

    seed: int
    ce: float | None
    steps: int = 0
    tokens: int = 0
    failed: str | None = None


@dataclass(frozen=True)
class TrialResult:
    """One combination of values.

    Attributes:
        number: from 0, in the order tried.
        values: by recipe key.
        seeds: its runs; those after a failed one are not run.
        failed: why the trial failed, or None.
        ce: the objective, the mean over the seeds; None if the trial failed.
        deviation: over the seeds (n − 1); None for one seed or a failed trial.
    """

    number: int
    values: dict[str, Scalar]
    seeds: tuple[SeedOutcome, ...]
    failed: str | None = field(init=False, default=None)
    ce: float | None = field(init=False, default=None)
    deviation: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        values = [seed.ce for seed in self.seeds if seed.ce is not None]
        if len(values) < len(self.seeds):
            failed = next(seed.failed for seed in self.seeds if seed.ce is None)
            object.__setattr__(self, "failed", failed)
            return
        object.__setattr__(self, "ce", statistics.fmean(values))
        if len(values) > 1:
            object.__setattr__(self, "deviation", statistics.stdev(values))

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON values, with perplexity = exp(ce) unless that is infinite."""
        power = math.inf if self.ce is None else perplexity(self.ce)
        return {
            "trial": self.number,
            "state": "complete" if self.failed is None else "failed",
            "ce": self.ce,
            "deviation": self.deviation,
            "perplexity": power if math.isfinite(power) else None,
            "values": self.values,
            "failed": self.failed,
            "seeds": [asdict(seed) for seed in self.seeds],
        }


@dataclass(frozen=True)
class SearchResult:
    """A search, finished or under way.

    Attributes:
        directory: where its study and results are.
        trials: those that were finished, in the order tried.
    """

    directory: Path
    trials: tuple[TrialResult, ...]

    @property
    def ranked(self) -> list[TrialResult]:
        """The completed trials, the best first, the earlier of equals."""
        complete = [trial for trial in self.trials if trial.ce is not None]
        return sorted(complete, key=lambda trial: (trial.ce or 0.0, trial.number))

    @property
    def best(self) -> TrialResult | None:
        """The trial with the least objective; None if all failed."""
        return next(iter(self.ranked), None)

    @property
    def best_recipe(self) -> Path:
        """The best trial as a recipe for ``prismlm train``."""
        return self.directory / BEST_FILE

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "directory": str(self.directory),
            "objective": OBJECTIVE,
            "best": None if self.best is None else self.best.to_dict(),
            "best_recipe": None if self.best is None else str(self.best_recipe),
            "trials": [trial.to_dict() for trial in self.trials],
        }


def search(
    recipe: Recipe,
    *,
    resume: bool = False,
    progress: Reporter = SILENT,
    on_trial: Callable[[TrialResult], None] = lambda trial: None,
) -> SearchResult:
    """Search a recipe's hyper-parameters as its ``search`` section says.

    The objective is the mean over the seeds of the held-out cross-entropy at the end of training.
    Everything is kept in ``out/search``: the study, which Optuna keeps in a journal, each run's
    history, and after every trial the results so far. With ``resume`` a search that was stopped
    keeps its finished trials and tries the others. A trial whose training diverges, or finds no
    memory, has failed; the search continues.

    Source: ProtoT, §4.

    Args:
        recipe: what is trained, with the values that are not searched.
        resume: continue the search in ``out``, or start if there is none.
        progress: shows each run.
        on_trial: called with each trial when it is finished.

    Raises:
        InputError: a package is missing, the space does not fit the recipe, ``out`` holds
            something else or another search, or the corpus is missing or too small.
        FormatError: the corpus or the study is damaged.
        PrismError: every trial failed, or the disk is full.
        TrainingInterrupted: Ctrl-C was pressed.
    """
    _check_packages(recipe.search)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or parallel.world_size() > 1:
        raise InputError("a search trains in one process. Start it without torchrun.")
    check_search(recipe, resume=resume)
    noted = described(recipe, Corpus.open(recipe.corpus)) | {
        "search": recipe.search.model_dump(mode="json"),
        "versions": versions("optuna", "optuna-integration", "botorch"),
    }
    # What the trial with the most rows a step needs is missed now, and not in the middle.
    sizes: dict[str, Any] = {
        key: dimension.high if isinstance(dimension, Range) else max(cast("list[int]", dimension))
        for key, dimension in recipe.search.dimensions().items()
        if key in ("batch_size", "gradient_accumulation")
    }
    prepare(recipe_with(recipe, sizes))
    directory = recipe.out / SEARCH
    way_out = "Make room, then resume with --resume."
    room = room_to_write(f"the search in {recipe.out}", recipe.out, way_out)
    with writing(directory, within=True), room:
        check_search(recipe, resume=resume)
        _check_same(directory, noted)
        study = _open_study(directory)
        result = _write(recipe, directory, noted, _finished(study))
        while len(result.trials) < recipe.search.trials:
            trial = _try(study, recipe, directory, progress)
            result = _write(recipe, directory, noted, _finished(study))
            on_trial(trial)
    if result.best is None:
        raise PrismError(
            f"all {len(result.trials)} trials failed; the last: {result.trials[-1].failed}. The "
            f"runs are in {directory}. Search lower learning rates, or use precision: float32."
        )
    return result


def _check_packages(search: SearchRecipe) -> None:
    """Import what the sampler needs; InputError names the extra where it is not installed."""
    try:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if search.sampler == "botorch":
            import botorch  # noqa: F401
            import optuna_integration.botorch  # noqa: F401
    except ModuleNotFoundError as error:
        missing = PACKAGES.get((error.name or "").split(".")[0])
        if missing is None:
            raise
        raise InputError(
            f"a search with the sampler {search.sampler!r} needs {missing}, which is not "
            "installed. Install prismlm with its search extra: pip install 'prismlm[search]'"
        ) from error


def check_search(recipe: Recipe, *, resume: bool) -> None:
    """Check that a recipe can be searched, and that ``out`` may be searched in."""
    check_space(recipe)
    space, head, out = recipe.search.space, recipe.head, recipe.out
    of_the_head = [key for key in space if key.startswith(OF_THE_HEAD)]
    if of_the_head and "head.detach" not in space and (head.detach or not head.enabled):
        raise InputError(
            f"search.space: {of_the_head[0]} does not change the cross-entropy that trials are "
            "compared by, since nothing of the head reaches the model. Leave it out, or set "
            "head.enabled to true and head.detach to false."
        )
    if (out / SEARCH / RESULTS_FILE).is_file():
        if not resume:
            raise InputError(
                f"{out} holds a search. Resume it with --resume, choose another out, or remove it."
            )
    elif out.exists() and (not out.is_dir() or any(path.name != SEARCH for path in out.iterdir())):
        raise InputError(
            f"{out} exists and holds no search. Choose another out (--set out=…), or remove it."
        )


def _check_same(directory: Path, noted: dict[str, Any]) -> None:
    """Check that a search there is this one; InputError names what differs."""
    file = directory / RESULTS_FILE
    if not file.is_file():
        return
    before = read_json(file)
    # More trials are the same search, longer.
    then, now = (
        {f"search.{key}": value for key, value in one["search"].items() if key != "trials"}
        for one in (before, noted)
    )
    if changed := differences(before, noted) + changes(then, now):
        raise InputError(
            f"{directory} was begun as another search ({'; '.join(changed)}), so it cannot be "
            "resumed with this recipe. Put these settings back, or search into another out."
        )


def _open_study(directory: Path) -> Any:
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    journal = directory / JOURNAL
    # A killed process left it; this one alone may write here.
    for lock in directory.glob(f"{JOURNAL}.lock*"):
        lock.unlink()
    try:
        backend = JournalFileBackend(str(journal), JournalFileOpenLock(str(journal)))
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=STUDY,
            direction="minimize",
            load_if_exists=True,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{journal} cannot be read ({error}). Search into another out; the results so far "
            f"are in {directory}."
        ) from error


def _finished(study: Any) -> tuple[TrialResult, ...]:
    """Return the trials with an outcome; one that was cut short is in the study alone."""
    trials = (t for t in study.get_trials(deepcopy=False) if "seeds" in t.user_attrs)
    return tuple(
        TrialResult(
            number, dict(trial.params), tuple(SeedOutcome(**s) for s in trial.user_attrs["seeds"])
        )
        for number, trial in enumerate(trials)
    )


def _try(study: Any, recipe: Recipe, directory: Path, progress: Reporter) -> TrialResult:
    """Draw the values of one trial, train its models and note what came of them.

    A trial is drawn by a generator of its own, seeded by the recipe's seed and its number.
    """
    from optuna.trial import TrialState

    for cut_short in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(cut_short.number, state=TrialState.FAIL)
    number = len(_finished(study))
    with warnings.catch_warnings():
        # Of Optuna's experimental classes, and BoTorch's of few and unscaled data.
        warnings.simplefilter("ignore")
        study.sampler = _sampler(recipe, number)
        asked = study.ask(
            {
                key: _distribution(recipe, key, dimension)
                for key, dimension in recipe.search.dimensions().items()
            }
        )
    values = {key: asked.params[key] for key in recipe.search.space}
    trial = run_trial(recipe, number, values, directory, progress)
    asked.set_user_attr("seeds", [asdict(seed) for seed in trial.seeds])
    study.tell(asked, trial.ce, state=TrialState.FAIL if trial.ce is None else None)
    return trial


def _sampler(recipe: Recipe, number: int) -> Any:
    from optuna.samplers import RandomSampler, TPESampler

    seed = int(np.random.SeedSequence([recipe.seed, number]).generate_state(1)[0]) >> 1
    startup = recipe.search.startup_trials
    if recipe.search.sampler == "random":
        return RandomSampler(seed=seed)
    if recipe.search.sampler == "tpe":
        return TPESampler(n_startup_trials=startup, seed=seed)
    from optuna_integration.botorch import BoTorchSampler

    return BoTorchSampler(n_startup_trials=startup, seed=seed)


def _distribution(recipe: Recipe, key: str, dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(dimension, Range):
        return CategoricalDistribution(dimension)
    if takes_whole_numbers(recipe, key, dimension):
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(float(dimension.low), float(dimension.high), log=dimension.log)


def run_trial(
    recipe: Recipe, number: int, values: dict[str, Scalar], directory: Path, progress: Reporter
) -> TrialResult:
    """Train a trial's models, one for each seed until one fails, and measure them.

    Of each run the history is kept and the model is not.
    """
    place = directory / TRIALS / f"{number:04d}"
    shutil.rmtree(place, ignore_errors=True)
    outcomes: list[SeedOutcome] = []
    for seed in range(recipe.seed, recipe.seed + recipe.search.seeds):
        try:
            run = recipe_with(recipe, values, seed=seed, out=place / f"seed-{seed}")
            outcomes.append(_run(run, _Named(progress, f"trial {number}, seed {seed}")))
        except InputError as error:
            shown = ", ".join(f"{key} {value}" for key, value in values.items())
            raise InputError(f"trial {number} ({shown}) cannot be run: {error}") from error
        if outcomes[-1].ce is None:
            break
    return TrialResult(number, values, tuple(outcomes))


def _run(recipe: Recipe, progress: Reporter) -> SeedOutcome:
    try:
        result = train(recipe, progress=progress)
        ce = result.ce
        failed = None if math.isfinite(ce) else f"the held-out cross-entropy is {ce}"
        outcome = SeedOutcome(recipe.seed, ce, result.steps, result.tokens)
    except (DivergenceError, torch.OutOfMemoryError) as error:
        failed = str(error).split("\n", maxsplit=1)[0].split(". ", maxsplit=1)[0].rstrip(".")
        outcome = SeedOutcome(recipe.seed, None)
    for path in recipe.out.iterdir() if recipe.out.is_dir() else ():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return outcome if failed is None else SeedOutcome(recipe.seed, None, failed=failed)


class _Named:
    """Shows the training of one run under the name of its trial, and no other task."""

    def __init__(self, inner: Reporter, name: str) -> None:
        self._inner, self._name = inner, name

    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> AbstractContextManager[Task]:
        """Open a task."""
        shown = self._inner if description == "training" else SILENT
        return shown.task(self._name, total, unit)


def _write(
    recipe: Recipe, directory: Path, noted: dict[str, Any], trials: tuple[TrialResult, ...]
) -> SearchResult:
    """Write ``search.json``, ``search.csv`` and, if a trial is complete, ``best.yaml``."""
    result = SearchResult(directory, trials)
    if (best := result.best) is not None:
        of_the_best = recipe_with(recipe, best.values, out=recipe.out / BEST_MODEL)
        runs = f"{len(best.seeds)} seeds" if len(best.seeds) > 1 else "one seed"
        head = (
            f"# The best of {len(trials)} trials of a search: trial {best.number}, held-out "
            f"cross-entropy\n# {best.ce:.4f}, the mean of {runs}. The others are in "
            f"{RESULTS_FILE}.\n\n"
        )
        with atomic_file(result.best_recipe) as temporary:
            text = yaml.safe_dump(of_the_best.to_dict(), sort_keys=False, allow_unicode=True)
            temporary.write_text(head + text, encoding="utf-8")
    columns = ["trial", "state", "ce", "deviation", "perplexity", *recipe.search.space]
    columns += ["seeds", "failed"]
    with atomic_file(directory / TABLE_FILE) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for trial in trials:
            seeds = ["failed" if seed.ce is None else repr(seed.ce) for seed in trial.seeds]
            writer.writerow(trial.to_dict() | trial.values | {"seeds": " ".join(seeds)})
    write_json(directory / RESULTS_FILE, noted | result.to_dict())
    return result


def estimate_search(recipe: Recipe, *, resume: bool = False) -> Cost:
    """Say what a search will take: that of one run of the recipe, for each run that is left.

    Nothing is written, and Optuna is not needed. Disk is of one run while it lasts, its model being
    removed when it is measured. The figures are ``trials`` in all, ``trials_left`` and ``runs``
    left; the part ``run`` is :func:`estimate` of one.

    Raises:
        InputError: as :func:`search`, but not for a missing package or GPU.
    """
    check_search(recipe, resume=resume)
    search, file = recipe.search, recipe.out / SEARCH / RESULTS_FILE
    # A directory that no trial is in.
    run = estimate(recipe_with(recipe, {}, out=recipe.out / SEARCH / TRIALS / "estimate"))
    left = max(0, search.trials - (len(read_json(file)["trials"]) if file.is_file() else 0))
    runs = left * search.seeds
    return Cost(
        runs * (run.seconds or 0.0),
        run.memory_bytes,
        run.disk_bytes,
        {"trials": search.trials, "trials_left": left, "runs": runs},
        parts=(replace(run, name="run"),),
        basis=f"{run.basis} Each trial trains on as much text; evaluations and the sampler are "
        "left out.",
    )
