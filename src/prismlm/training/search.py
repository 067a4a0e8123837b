"""Hyper-parameter search: an Optuna study whose trials are means over seeds."""

from __future__ import annotations

import os
import shutil
import statistics
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from prismlm.errors import (
    DivergenceError,
    InputError,
    Interrupted,
    PrismError,
    first_line,
    suggest,
)
from prismlm.files import atomic_file, read_json, write_json
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import Busy, check_same, writing
from prismlm.training.recipe import Range, Recipe, Scalar, build_recipe, flat, set_value
from prismlm.training.run import BEST_FILE, RUN_FILE, SEARCH, TENSORBOARD, result_settings, train
from prismlm.training.setup import describe_run, prepare
from prismlm.training.trainer import HISTORY_FILE

JOURNAL, STUDY = "study.journal", "prismlm"
RESULTS_FILE, BEST_MODEL, TRIALS = "search.json", "best", "trials"
# The files of a run that are kept; its model is removed.
KEPT_FILES = (RUN_FILE, HISTORY_FILE, TENSORBOARD)
# Not searchable, since trials would not be comparable.
FIXED = {
    *("corpus", "out", "seed", "device", "parallel", "shard_processes", "data.length"),
    *("search", "evaluation", "checkpoint", "logging"),
}
# Scaled when a trial takes more or fewer steps.
STEP_KEYS = ("steps", "head.initialise_at_step", "evaluation.every", "checkpoint.every")
# They change no cross-entropy while no gradient of the head reaches the model.
HEAD_KEYS = ("head.", "losses.", "optimizer.head_")
# Errors that end a trial, but not the search.
FAILURES = (DivergenceError, InputError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class TrialResult:
    """A trial: a combination of values, and the cross-entropy of a run per seed."""

    trial: int  # from 0
    ce: float | None  # the objective: mean over seeds on held-out text, in nats per token
    deviation: float | None  # standard deviation over seeds (n − 1)
    values: dict[str, Scalar]  # by recipe key
    failed: str | None  # why
    seeds: list[float]  # the cross-entropy of each run


@dataclass(frozen=True)
class SearchResult:
    """A search and its finished trials, in order."""

    directory: Path
    trials: tuple[TrialResult, ...]

    @property
    def ranked(self) -> list[TrialResult]:
        """The completed trials, best first."""
        return sorted((t for t in self.trials if t.ce is not None), key=lambda t: t.ce or 0.0)

    @property
    def best(self) -> TrialResult | None:
        """The best trial; None if all failed."""
        return next(iter(self.ranked), None)

    @property
    def best_recipe(self) -> Path:
        """The best trial as a recipe for ``prismlm train``."""
        return self.directory / BEST_FILE

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "directory": str(self.directory),
            "best": None if self.best is None else asdict(self.best),
            "best_recipe": None if self.best is None else str(self.best_recipe),
            "trials": [asdict(trial) for trial in self.trials],
        }


def search(
    recipe: Recipe,
    *,
    resume: bool = False,
    progress: Reporter = SILENT,
    on_trial: Callable[[TrialResult], None] = lambda trial: None,
) -> SearchResult:
    """Search hyper-parameters as the ``search`` section of a recipe says.

    The study, the histories of all runs and the results so far are in ``out/search``. A trial that
    diverges, runs out of memory or has too little text for a step fails, and the search continues.
    Source: ProtoT, §4.

    ``resume`` continues a search in ``out``, keeping its finished trials, or joins one: a process
    takes trials that no other is training. ``on_trial`` is called with each that it finishes; the
    result has those of all processes so far.

    Raises:
        InputError: the search cannot start; PrismError: every trial failed, or the disk is full.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "a trial trains in one process. Start the search without torchrun; several processes "
            "with --search --resume share its trials."
        )
    check_search(recipe, resume=resume)
    # Raises now if no trial could be trained.
    run = describe_run(recipe, prepare(recipe).corpus)
    # An address may hold a password.
    run |= {"search": recipe.search.model_dump(mode="json", exclude={"storage"})}
    directory = recipe.out / SEARCH
    with warnings.catch_warnings():
        # BoTorch warns of few and unscaled data, and Optuna of its experimental sampler.
        warnings.simplefilter("ignore")
        with writing(directory, within=True, wait=True):
            _check_same_search(directory, run)
            study = _open_study(recipe)
            result = _write(recipe, study, run)
        while (number := _take_trial(recipe, study, progress)) is not None:
            with writing(directory, within=True, wait=True):
                result = _write(recipe, study, run)
            on_trial(next(trial for trial in result.trials if trial.trial == number))
    if result.best is None and len(result.trials) == recipe.search.trials:
        raise PrismError(
            f"all {len(result.trials)} trials failed; the last: {result.trials[-1].failed}. The "
            f"runs are in {directory}. Search lower learning rates, or use precision: float32."
        )
    return result


def check_search(recipe: Recipe, *, resume: bool) -> None:
    """Check that a recipe can be searched, by what is installed, and that ``out`` can be used."""
    out = recipe.out
    try:
        import optuna  # noqa: F401

        if recipe.search.sampler == "botorch":
            import botorch  # noqa: F401
            import optuna_integration.botorch  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"{error}: install the extra, pip install 'prismlm[search]'.") from error
    check_space(recipe)
    if (out / SEARCH / RESULTS_FILE).is_file():
        if not resume:
            raise InputError(
                f"{out} holds a search. Resume it with --resume, choose another out, or remove it."
            )
    elif out.exists() and any(path.name != SEARCH for path in out.iterdir()):
        raise InputError(f"{out} exists and does not hold a search. Choose another out.")


def check_space(recipe: Recipe) -> None:
    """Check every key of a search space, with every choice or both ends, and that each matters."""
    known = [key for key in flat(recipe.to_dict()) if not {key, key.split(".")[0]} & FIXED]
    for key, dimension in recipe.search.space.items():
        # Keys of the model are checked by building it.
        if key not in known and not (key.startswith("model.") and key.count(".") == 1):
            raise InputError(
                f"search.space: {key!r} cannot be searched over.{suggest(key, known)} Expected a "
                "key of the recipe that keeps runs comparable, or model.NAME."
            )
        ends = (dimension.low, dimension.high) if isinstance(dimension, Range) else dimension
        for value in ends:
            recipe_with(recipe, {key: value})
    space, head = recipe.search.space, recipe.head
    without_effect = [key for key in space if key.startswith(HEAD_KEYS)]
    if without_effect and "head.detach" not in space and (head.detach or not head.enabled):
        raise InputError(
            f"search.space: {without_effect[0]} does not affect the cross-entropy by which trials "
            "are compared, since no gradient of the head reaches the model. Leave it out, or set "
            "head.enabled to true and head.detach to false."
        )


def recipe_with(recipe: Recipe, values: Mapping[str, Scalar], **changes: Any) -> Recipe:
    """Return a recipe with other values that trains on as many positions, unless they set steps.

    ``changes`` replace keys that are not searched: ``seed`` and ``out``.
    """
    settings = recipe.to_dict() | changes
    for key, value in values.items():
        set_value(settings, key, value, "search.space")
    changed = build_recipe(settings, "search.space")
    ratio = recipe.positions_per_step / changed.positions_per_step
    if "steps" in values or ratio == 1:
        return changed
    for key, count in flat(settings).items():
        if key in STEP_KEYS and count:
            set_value(settings, key, max(1, round(count * ratio)), "search.space")
    return build_recipe(settings, "search.space")


def _check_same_search(directory: Path, run: dict[str, Any]) -> None:
    """Check that a search to resume has the same settings; it may have more trials."""
    if not (directory / RESULTS_FILE).is_file():
        return
    before, now = (
        result_settings(one) | {f"search.{k}": v for k, v in one["search"].items() if k != "trials"}
        for one in (read_json(directory / RESULTS_FILE), run)
    )
    way_out = "Restore these settings, or search into another out."
    check_same(f"{directory} was begun as another search", before, now, way_out)


def _open_study(recipe: Recipe) -> Any:
    """Open the study, in a file or a database, where it is named by the directory of the search."""
    import optuna
    from optuna.storages import JournalStorage, get_storage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    directory, storage, name = recipe.out / SEARCH, recipe.search.storage, STUDY
    try:
        if storage is None:
            opened: Any = JournalStorage(JournalFileBackend(str(directory / JOURNAL)))
        else:
            opened, name = get_storage(storage), str(directory.resolve())
        study = optuna.create_study(storage=opened, study_name=name, load_if_exists=True)
    except Exception as error:  # of SQLAlchemy, a driver or the database
        raise InputError(
            f"search.storage cannot be opened ({first_line(error)}). Expected a URL as SQLAlchemy "
            "reads it, such as sqlite:///study.db or postgresql://user@host/name, and its driver."
        ) from error
    if not (directory / RESULTS_FILE).is_file() and study.trials:
        raise InputError(f"search.storage has another search of {directory}: choose another out.")
    return study


def _take_trial(recipe: Recipe, study: Any, progress: Reporter) -> int | None:
    """Train the first trial that is neither finished nor another process's; None without one."""
    from optuna.trial import TrialState

    for number in range(recipe.search.trials):
        directory = recipe.out / SEARCH / TRIALS / f"{number:04d}"
        # Another process may be training it.
        with suppress(Busy), writing(directory, within=True):
            if number in _finished(study):
                continue
            # A generator per trial, so that a resumed search draws the same values.
            study.sampler = _sampler(recipe, number)
            trial = study.ask(_distributions(recipe))
            trial.set_user_attr("number", number)
            seeds, failed = _train_seeds(recipe, trial.params, directory, progress)
            for name, value in (("seeds", seeds), ("failed", failed)):
                trial.set_user_attr(name, value)
            if failed is None:
                study.tell(trial, statistics.fmean(seeds))
            else:
                study.tell(trial, state=TrialState.FAIL)
            return number
    return None


def _sampler(recipe: Recipe, number: int) -> Any:
    from optuna.samplers import RandomSampler, TPESampler

    seed = int(np.random.SeedSequence([recipe.seed, number]).generate_state(1)[0]) >> 1
    if recipe.search.sampler == "random":
        return RandomSampler(seed=seed)
    kind = TPESampler
    if recipe.search.sampler == "botorch":
        from optuna_integration.botorch import BoTorchSampler as kind
    return kind(n_startup_trials=recipe.search.startup_trials, seed=seed)


def _distributions(recipe: Recipe) -> dict[str, Any]:
    """Return Optuna's form of the space; a range holds integers if its ends and its key do."""
    from optuna import distributions as of

    space, before = dict[str, Any](), flat(recipe.to_dict())
    for key, dimension in recipe.search.space.items():
        if not isinstance(dimension, Range):
            space[key] = of.CategoricalDistribution(dimension)
            continue
        ends = (dimension.low, dimension.high)
        integers = all(isinstance(x, int) for x in ends) and not isinstance(before.get(key), float)
        kind: Any = of.IntDistribution if integers else of.FloatDistribution
        space[key] = kind(*ends, log=dimension.log)
    return space


def _train_seeds(
    recipe: Recipe, values: Mapping[str, Scalar], directory: Path, progress: Reporter
) -> tuple[list[float], str | None]:
    """Train a model per seed; return their cross-entropies, and why one failed, if it did."""
    for left in directory.glob("seed-*"):
        shutil.rmtree(left)
    seeds = list[float]()
    for seed in range(recipe.seed, recipe.seed + recipe.search.seeds):
        out = directory / f"seed-{seed}"
        try:
            # Raises for values that are valid on their own but not together.
            run = recipe_with(recipe, values, seed=seed, out=out)
            seeds.append(train(run, progress=progress).ce)
        except Interrupted as stop:
            # It names a checkpoint, which is removed.
            raise Interrupted("search stopped; finished trials are kept", stop.exit_code) from stop
        except FAILURES as error:
            return seeds, first_line(error).split(". ")[0].rstrip(".")
        finally:
            for path in out.iterdir() if out.is_dir() else ():
                if path.name not in KEPT_FILES:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seeds, None


def _finished(study: Any) -> dict[int, Any]:
    """Return Optuna's trials with a result, by number."""
    trials = (t for t in study.get_trials(deepcopy=False) if "failed" in t.user_attrs)
    return {trial.user_attrs["number"]: trial for trial in trials}


def _result(number: int, trial: Any) -> TrialResult:
    """Return the result of a finished trial of Optuna."""
    seeds, failed = trial.user_attrs["seeds"], trial.user_attrs["failed"]
    ce = statistics.fmean(seeds) if failed is None else None
    deviation = statistics.stdev(seeds) if failed is None and len(seeds) > 1 else None
    return TrialResult(number, ce, deviation, dict(trial.params), failed, seeds)


def _write(recipe: Recipe, study: Any, run: dict[str, Any]) -> SearchResult:
    """Write ``search.json`` and, if a trial is complete, ``best.yaml``."""
    trials = tuple(_result(*finished) for finished in sorted(_finished(study).items()))
    result = SearchResult(recipe.out / SEARCH, trials)
    if (best := result.best) is not None:
        best_recipe = recipe_with(recipe, best.values, out=recipe.out / BEST_MODEL).to_dict()
        head = (
            f"# Trial {best.trial}, the best of {len(trials)}; the others are in {RESULTS_FILE}.\n"
            f"# Held-out cross-entropy {best.ce:.4f}, mean over {len(best.seeds)} seeds.\n\n"
        )
        with atomic_file(result.best_recipe) as temporary:
            text = yaml.safe_dump(best_recipe, sort_keys=False, allow_unicode=True)
            temporary.write_text(head + text, encoding="utf-8")
    write_json(result.directory / RESULTS_FILE, run | result.to_dict())
    return result
