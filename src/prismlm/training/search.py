"""Searching hyper-parameters: an Optuna study whose every trial is a mean over seeds."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from prismlm.cost import Cost
from prismlm.errors import DivergenceError, InputError, PrismError, suggest
from prismlm.files import atomic_file, read_json, room_to_write, write_json
from prismlm.outputs import put_csv
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import check_same, writing
from prismlm.training import parallel
from prismlm.training.evaluation import perplexity
from prismlm.training.layer_logs import CHANNELS_FILE, HEADS_FILE, REPORT_FILE
from prismlm.training.recipe import Range, Recipe, Scalar, SearchRecipe
from prismlm.training.recipe_file import build_recipe, flat
from prismlm.training.run import (
    BEST_FILE,
    HISTORY_FILE,
    RUN_FILE,
    SEARCH,
    TENSORBOARD,
    estimate,
    settings_of,
    train,
)
from prismlm.training.setup import described, prepare, versions

JOURNAL, STUDY = "study.journal", "prismlm"
RESULTS_FILE, TABLE_FILE, BEST_MODEL, TRIALS = "search.json", "search.csv", "best", "trials"
# What stays of a run when it is measured: its model does not.
KEPT = (RUN_FILE, HISTORY_FILE, CHANNELS_FILE, HEADS_FILE, REPORT_FILE, TENSORBOARD)
# No hyper-parameters, or trials would not compare.
FIXED = {
    *("corpus", "out", "seed", "device", "parallel", "data.length"),
    *("search", "evaluation", "checkpoint", "logging"),
}
# Counted in steps; they keep their share of a run where a trial has more or fewer.
IN_STEPS = (
    "steps",
    "head.initialise_at_step",
    "head.revive_every",
    "evaluation.every",
    "checkpoint.every",
)
OF_THE_HEAD = ("head.", "losses.", "optimizer.head_")
FAILURES = (DivergenceError, InputError, torch.OutOfMemoryError)
OBJECTIVE = (
    "mean over the seeds of the cross-entropy on held-out text at the end of training, in nats per "
    "token; the less the better"
)


@dataclass(frozen=True)
class TrialResult:
    """One combination of values.

    Attributes:
        number: from 0, in the order tried.
        values: by recipe key.
        seeds: the cross-entropy of each run, on ``evaluation.final_tokens`` of held-out text at the
            end, in nats per token; those after a failed one are not run.
        failed: why a run, and so the trial, failed; None if it did not.
    """

    number: int
    values: dict[str, Scalar]
    seeds: tuple[float, ...]
    failed: str | None = None

    @property
    def ce(self) -> float | None:
        """The objective, the mean over the seeds; None if the trial failed."""
        return statistics.fmean(self.seeds) if self.failed is None else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds (n − 1); None for one seed or a failed trial."""
        several = self.failed is None and len(self.seeds) > 1
        return statistics.stdev(self.seeds) if several else None

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
            "seeds": list(self.seeds),
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
        """The completed trials, the best first."""
        complete = [trial for trial in self.trials if trial.ce is not None]
        return sorted(complete, key=lambda trial: trial.ce or 0.0)

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
    The study, each run's history and the results so far are kept in ``out/search``. A trial whose
    training diverges, finds no memory or has too little text for a step has failed; the search
    continues. Source: ProtoT, §4.

    Args:
        recipe: what is trained, with the values that are not searched.
        resume: keep the finished trials of a search in ``out`` and try the others.
        progress: shows each run.
        on_trial: called with each trial when it is finished.

    Raises:
        InputError: a package is missing, the space does not fit the recipe, ``out`` holds
            something else or another search, or the recipe itself cannot be trained.
        PrismError: every trial failed, or the disk is full.
        TrainingInterrupted: Ctrl-C was pressed.
    """
    _check_packages(recipe.search)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or parallel.world_size() > 1:
        raise InputError("a search trains in one process. Start it without torchrun.")
    check_search(recipe, resume=resume)
    # What no trial could be trained on or with is not fifty failed trials.
    noted = described(recipe, prepare(recipe).corpus) | {
        "search": recipe.search.model_dump(mode="json"),
        "versions": versions("optuna", "optuna-integration", "botorch"),
    }
    directory = recipe.out / SEARCH
    way_out = "Make room, then resume with --resume."
    room = room_to_write(f"the search in {recipe.out}", recipe.out, way_out)
    with writing(directory, within=True), room:
        _check_resumed(directory, noted)
        study = _open_study(directory)
        result = _write(recipe, SearchResult(directory, _finished(study)), noted)
        while len(result.trials) < recipe.search.trials:
            number = len(result.trials)
            # Drawn by a generator of its own, so that a resumed search draws the same.
            study.sampler = _sampler(recipe, number)
            tried = partial(_try, number=number, recipe=recipe, progress=progress)
            with warnings.catch_warnings():
                # BoTorch's, of few and unscaled data.
                warnings.simplefilter("ignore")
                study.optimize(tried, n_trials=1, catch=FAILURES)
            result = _write(recipe, SearchResult(directory, _finished(study)), noted)
            on_trial(result.trials[-1])
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

        optuna.logging.set_verbosity(optuna.logging.CRITICAL)
        if search.sampler == "botorch":
            import botorch  # noqa: F401
            import optuna_integration.botorch  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(
            f"a search with the sampler {search.sampler!r} needs {error.name}, which is not "
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


def check_space(recipe: Recipe) -> None:
    """Check that every key of a recipe's search space is one, and takes every choice and end."""
    known = [key for key in flat(recipe.to_dict()) if not {key, key.split(".")[0]} & FIXED]
    for key, dimension in recipe.search.space.items():
        # Those of the model are its own, which building it checks.
        if key not in known and not (key.startswith("model.") and key.count(".") == 1):
            raise InputError(
                f"search.space: {key!r} cannot be searched over.{suggest(key, known)} Known: "
                f"{', '.join(known)}, and model.NAME for the model's own."
            )
        ends = (dimension.low, dimension.high) if isinstance(dimension, Range) else dimension
        for value in ends:
            recipe_with(recipe, {key: value})


def recipe_with(
    recipe: Recipe,
    values: Mapping[str, Scalar],
    *,
    seed: int | None = None,
    out: Path | None = None,
) -> Recipe:
    """Return a recipe with other values, as long as the given one in positions trained on.

    Where a step takes more or fewer positions than before, all that is counted in steps is scaled,
    unless ``steps`` is among the values: every trial sees as much text.
    """
    settings = recipe.to_dict()
    for key, value in values.items():
        _put(settings, key, value)
    settings["seed"] = recipe.seed if seed is None else seed
    settings["out"] = str(recipe.out if out is None else out)
    changed = build_recipe(settings, "search.space")
    ratio = recipe.positions_per_step / changed.positions_per_step
    if "steps" in values or ratio == 1:
        return changed
    for key, count in flat(settings).items():
        if key in IN_STEPS and count:
            _put(settings, key, max(1, round(count * ratio)))
    head = settings["head"]
    if head["initialise_at_step"] is not None and settings["steps"]:
        # Rounding may have put it at the end of a very short run.
        head["initialise_at_step"] = min(head["initialise_at_step"], settings["steps"] - 1)
    return build_recipe(settings, "search.space")


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for part in sections:
        settings = settings[part]
    settings[name] = value


def _check_resumed(directory: Path, noted: dict[str, Any]) -> None:
    """Check that a search there is this one; InputError names what differs."""
    if not (directory / RESULTS_FILE).is_file():
        return
    # More trials are the same search, longer.
    before, now = (
        settings_of(one) | {f"search.{k}": v for k, v in one["search"].items() if k != "trials"}
        for one in (read_json(directory / RESULTS_FILE), noted)
    )
    way_out = "Put these settings back, or search into another out."
    check_same(f"{directory} was begun as another search", before, now, way_out)


def _open_study(directory: Path) -> Any:
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    journal = str(directory / JOURNAL)
    # A killed process left it; this one alone may write here.
    for lock in directory.glob(f"{JOURNAL}.lock*"):
        lock.unlink()
    backend = JournalFileBackend(journal, JournalFileOpenLock(journal))
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name=STUDY,
        direction="minimize",
        load_if_exists=True,
    )


def _finished(study: Any) -> tuple[TrialResult, ...]:
    """Return the trials with an outcome; one that was cut short is in the study alone."""
    trials = (t for t in study.get_trials(deepcopy=False) if "failed" in t.user_attrs)
    return tuple(
        TrialResult(number, dict(t.params), tuple(t.user_attrs["seeds"]), t.user_attrs["failed"])
        for number, t in enumerate(trials)
    )


def _sampler(recipe: Recipe, number: int) -> Any:
    from optuna.samplers import RandomSampler, TPESampler

    seed = int(np.random.SeedSequence([recipe.seed, number]).generate_state(1)[0]) >> 1
    startup = recipe.search.startup_trials
    if recipe.search.sampler == "random":
        return RandomSampler(seed=seed)
    if recipe.search.sampler == "tpe":
        return TPESampler(n_startup_trials=startup, seed=seed)
    from optuna_integration.botorch import BoTorchSampler

    with warnings.catch_warnings():
        # It is experimental.
        warnings.simplefilter("ignore")
        return BoTorchSampler(n_startup_trials=startup, seed=seed)


def _try(trial: Any, number: int, recipe: Recipe, progress: Reporter) -> float:
    """Train a trial's models, one for each seed until one fails; return their mean cross-entropy.

    Their histories are kept and the models are not.
    """
    values = _drawn(trial, recipe)
    directory = recipe.out / SEARCH / TRIALS / f"{number:04d}"
    shutil.rmtree(directory, ignore_errors=True)
    seeds: list[float] = []
    failed = None
    try:
        for seed in range(recipe.seed, recipe.seed + recipe.search.seeds):
            out = directory / f"seed-{seed}"
            # Values that are allowed one by one may not go together.
            run = recipe_with(recipe, values, seed=seed, out=out)
            try:
                seeds.append(train(run, progress=progress).ce)
            finally:
                _remove_model(out)
    except FAILURES as error:
        failed = str(error).split("\n")[0].split(". ")[0].rstrip(".")
        raise
    finally:
        if failed or len(seeds) == recipe.search.seeds:
            trial.set_user_attr("seeds", seeds)
            trial.set_user_attr("failed", failed)
    return statistics.fmean(seeds)


def _drawn(trial: Any, recipe: Recipe) -> dict[str, Scalar]:
    """Return the values of a trial; a range holds whole numbers if its ends and its key do."""
    values, before = dict[str, Scalar](), flat(recipe.to_dict())
    for key, dimension in recipe.search.space.items():
        if not isinstance(dimension, Range):
            values[key] = trial.suggest_categorical(key, dimension)
            continue
        low, high, log = dimension.low, dimension.high, dimension.log
        whole = isinstance(low, int) and isinstance(high, int)
        if whole and not isinstance(before.get(key), float):
            values[key] = trial.suggest_int(key, low, high, log=log)
        else:
            values[key] = trial.suggest_float(key, low, high, log=log)
    return values


def _remove_model(out: Path) -> None:
    for path in out.iterdir() if out.is_dir() else ():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write(recipe: Recipe, result: SearchResult, noted: dict[str, Any]) -> SearchResult:
    """Write ``search.json``, ``search.csv`` and, if a trial is complete, ``best.yaml``."""
    if (best := result.best) is not None:
        of_the_best = recipe_with(recipe, best.values, out=recipe.out / BEST_MODEL).to_dict()
        head = (
            f"# Trial {best.number}, the best of {len(result.trials)}; the others are in "
            f"{RESULTS_FILE}.\n# Held-out cross-entropy {best.ce:.4f}, mean over seeds: "
            f"{len(best.seeds)}.\n\n"
        )
        with atomic_file(result.best_recipe) as temporary:
            text = yaml.safe_dump(of_the_best, sort_keys=False, allow_unicode=True)
            temporary.write_text(head + text, encoding="utf-8")
    figures = ("trial", "state", "ce", "deviation", "perplexity")
    columns = (*figures, *recipe.search.space, "seeds", "failed")
    rows = []
    for trial in result.trials:
        row = trial.to_dict() | trial.values | {"seeds": " ".join(map(repr, trial.seeds))}
        rows.append({name: row.get(name) for name in columns})
    with atomic_file(result.directory / TABLE_FILE) as temporary:
        put_csv(temporary, columns, rows)
    write_json(result.directory / RESULTS_FILE, noted | result.to_dict())
    return result


def estimate_search(recipe: Recipe, *, resume: bool = False) -> Cost:
    """Say what a search will take: that of one run of the recipe, for each run that is left.

    Nothing is written, and Optuna is not needed. Disk is of one run while it lasts. The figures are
    ``trials`` in all, ``trials_left`` and ``runs`` left; the part ``run`` is that of one.
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
