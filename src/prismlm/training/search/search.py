"""Searching hyper-parameters: trial after trial, each a mean over seeds, resumable at any time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prismlm.corpus.store import Corpus
from prismlm.errors import InputError, PrismError, changes
from prismlm.files import read_json, room_to_write
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing
from prismlm.training import distributed
from prismlm.training.device import resolved, versions
from prismlm.training.dimensions import ends_of
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import SEARCH, differences
from prismlm.training.search.result import (
    BEST_MODEL,
    RESULTS_FILE,
    SearchResult,
    SeedOutcome,
    TrialResult,
    write_results,
)
from prismlm.training.search.runs import run_trial
from prismlm.training.search.space import check_measured, check_space, recipe_of
from prismlm.training.search.study import Study, check_packages
from prismlm.training.setup import prepare

# More trials are the same search, longer.
FREE_TO_CHANGE = ("trials",)
GO_ON = "Make room, then resume with --resume."


def search(
    recipe: Recipe,
    *,
    resume: bool = False,
    progress: Reporter = SILENT,
    on_trial: Callable[[TrialResult], None] = lambda trial: None,
) -> SearchResult:
    """Search a recipe's hyper-parameters as its ``search`` section says.

    The objective is the mean over the seeds of the held-out cross-entropy at the end of training.
    Everything is kept in ``out/search``: the study, each run's history, and after every trial the
    results so far. A search that was killed goes on with ``resume``: a finished run is not done
    again, one that was cut short goes on from its checkpoint, and the trials are those that an
    uninterrupted search comes to. A trial whose training diverges, or finds no memory, has failed;
    the search goes on.

    Source: ProtoT, §4.

    Args:
        recipe: what is trained, with the values that are not searched.
        resume: go on with the search in ``out``, or start if there is none.
        progress: shows each run.
        on_trial: called with each trial when it is finished.

    Raises:
        InputError: a package is missing, the space does not fit the recipe, ``out`` holds
            something else or another search, or the corpus is missing or too small.
        FormatError: the corpus or the study is damaged.
        PrismError: every trial failed, or the disk is full.
        TrainingInterrupted: Ctrl-C was pressed.
    """
    check_packages(recipe.search)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or distributed.world_size() > 1:
        raise InputError("a search trains in one process. Start it without torchrun.")
    check_space(recipe)
    check_measured(recipe)
    check_search(recipe, resume=resume)
    noted = _noted(recipe)
    # What the trial with the most rows a step needs is missed now, and not in the middle.
    sizes: dict[str, Any] = {
        key: max(ends_of(dimension))
        for key, dimension in recipe.search.dimensions().items()
        if key in ("batch_size", "gradient_accumulation")
    }
    prepare(recipe_of(recipe, sizes))
    directory = recipe.out / SEARCH
    room = room_to_write(f"the search in {recipe.out}", recipe.out, GO_ON)
    with writing(directory, within=True), room:
        check_search(recipe, resume=resume)
        _check_same(directory, recipe, noted)
        return _search(recipe, directory, noted, progress, on_trial)


def check_search(recipe: Recipe, *, resume: bool) -> None:
    """Check that ``out`` may be searched in.

    Raises:
        InputError: it holds something else, or a search that ``resume`` was not asked for.
    """
    out = recipe.out
    if (out / SEARCH / RESULTS_FILE).is_file():
        if not resume:
            raise InputError(
                f"{out} holds a search. Resume it with --resume, choose another out, or remove it."
            )
    elif out.exists() and (not out.is_dir() or any(path.name != SEARCH for path in out.iterdir())):
        raise InputError(
            f"{out} exists and holds no search. Choose another out (--set out=…), or remove it."
        )


def finished_trials(recipe: Recipe) -> tuple[TrialResult, ...]:
    """Return the finished trials of the search in ``out``, if there is one."""
    file = recipe.out / SEARCH / RESULTS_FILE
    rows = read_json(file)["trials"] if file.is_file() else []
    return tuple(
        TrialResult(
            row["trial"], row["values"], tuple(SeedOutcome(**seed) for seed in row["seeds"])
        )
        for row in rows
    )


def _search(
    recipe: Recipe,
    directory: Path,
    noted: dict[str, Any],
    progress: Reporter,
    on_trial: Callable[[TrialResult], None],
) -> SearchResult:
    study = Study(directory, recipe)
    # The study is told first: of a trial that a kill came after, the runs' outcomes are there.
    trials = {trial.number: trial for trial in finished_trials(recipe)}
    for number, values in study.finished().items():
        if number not in trials:
            own = {key: values[key] for key in recipe.search.space}
            trials[number] = run_trial(recipe, number, own, directory, SILENT)
    result = _write(recipe, directory, noted, trials)
    while len(trials) < recipe.search.trials:
        number, values = study.ask()
        trial = run_trial(recipe, number, values, directory, progress)
        study.tell(number, trial.ce)
        trials[number] = trial
        result = _write(recipe, directory, noted, trials)
        on_trial(trial)
    if result.best is None:
        raise PrismError(
            f"all {len(trials)} trials failed; the last: {list(trials.values())[-1].failed}. The "
            f"runs are in {directory}. Search lower learning rates, or use precision: float32."
        )
    return result


def _write(
    recipe: Recipe, directory: Path, noted: dict[str, Any], trials: dict[int, TrialResult]
) -> SearchResult:
    result = SearchResult(directory, tuple(trials[number] for number in sorted(trials)))
    best = None
    if result.best is not None:
        best = recipe_of(recipe, result.best.values, out=recipe.out / BEST_MODEL)
    write_results(result, noted, best)
    return result


def _noted(recipe: Recipe) -> dict[str, Any]:
    corpus = Corpus.open(recipe.corpus)
    return {
        "recipe": recipe.to_dict(),
        "resolved": resolved(recipe),
        "search": recipe.search.model_dump(mode="json"),
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "versions": versions("optuna", "optuna-integration", "botorch"),
    }


def _check_same(directory: Path, recipe: Recipe, noted: dict[str, Any]) -> None:
    file = directory / RESULTS_FILE
    if not file.is_file():
        return
    before = read_json(file)
    then, now = (
        {f"search.{k}": v for k, v in one["search"].items() if k not in FREE_TO_CHANGE}
        for one in (before, noted)
    )
    changed = differences(before, recipe) + changes(then, now)
    if before["corpus"]["fingerprint"] != noted["corpus"]["fingerprint"]:
        changed.append(f"corpus: {before['corpus']['name']} → {noted['corpus']['name']}")
    if changed:
        raise InputError(
            f"{directory} was begun as another search ({'; '.join(changed)}), so it cannot be "
            "resumed with this recipe. Put these settings back, or search into another out."
        )
