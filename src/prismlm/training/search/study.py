"""The study of a search: which values were tried, what came of them, which are next.

It is an Optuna study in a journal file, which ``optuna-dashboard`` reads too. Optuna is imported
here and nowhere else.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from prismlm.errors import FormatError, InputError
from prismlm.training.dimensions import Dimension, Range, Scalar
from prismlm.training.recipe import Recipe, SearchRecipe
from prismlm.training.search.space import takes_whole_numbers

JOURNAL = "study.journal"
NAME = "prismlm"
PACKAGES = {"optuna": "optuna", "optuna_integration": "optuna-integration", "botorch": "botorch"}


def check_packages(search: SearchRecipe) -> None:
    """Import what the sampler needs.

    Raises:
        InputError: it is not installed; the error names the extra.
    """
    try:
        import optuna  # noqa: F401

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


class Study:
    """The trials of one search.

    Every trial is drawn with a generator of its own, seeded by the recipe's seed and its number.
    So a search that was interrupted goes on to the very trials that it would have come to.

    Args:
        directory: where the journal is, or is to be. Only this process may write to it.
        recipe: its ``search`` says what is drawn and how.

    Raises:
        FormatError: the journal is damaged.
    """

    def __init__(self, directory: Path, recipe: Recipe) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._search = recipe.search
        self._seed = recipe.seed
        self._distributions = {
            key: _distribution(recipe, key, dimension)
            for key, dimension in recipe.search.dimensions().items()
        }
        journal = directory / JOURNAL
        _mend(journal)
        backend = JournalFileBackend(str(journal), JournalFileOpenLock(str(journal)))
        try:
            storage = optuna.storages.JournalStorage(backend)
            self._study = optuna.create_study(
                storage=storage, study_name=NAME, direction="minimize", load_if_exists=True
            )
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"{journal} cannot be read ({error}). Search into another out; the results so far "
                f"are in {directory}."
            ) from error

    def ask(self) -> tuple[int, dict[str, Scalar]]:
        """Return number and values of the trial that was cut short, if one was, or of a new one."""
        from optuna.trial import Trial, TrialState

        trials = self._study.get_trials(deepcopy=False)
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        number = running[0].number if running else len(trials)
        with warnings.catch_warnings():
            # Of Optuna's experimental classes, and BoTorch's of few and unscaled data.
            warnings.simplefilter("ignore")
            self._study.sampler = self._sampler(number)
            # The constructor is what study.ask() calls; only it goes on with a trial of before.
            trial = Trial(self._study, running[0]._trial_id) if running else self._study.ask()
            values = {
                name: trial._suggest(name, distribution)
                for name, distribution in self._distributions.items()
            }
        return trial.number, values

    def tell(self, number: int, value: float | None) -> None:
        """Note a trial's objective, or None if it failed."""
        from optuna.trial import TrialState

        self._study.tell(number, value, state=TrialState.FAIL if value is None else None)

    def finished(self) -> dict[int, dict[str, Scalar]]:
        """Return the values of every trial whose outcome is noted, by number."""
        trials = self._study.get_trials(deepcopy=False)
        return {trial.number: dict(trial.params) for trial in trials if trial.state.is_finished()}

    def _sampler(self, number: int) -> Any:
        from optuna.samplers import RandomSampler, TPESampler

        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0]) >> 1
        startup = self._search.startup_trials
        if self._search.sampler == "random":
            return RandomSampler(seed=seed)
        if self._search.sampler == "tpe":
            return TPESampler(n_startup_trials=startup, seed=seed)
        from optuna_integration.botorch import BoTorchSampler

        return BoTorchSampler(n_startup_trials=startup, seed=seed)


def _distribution(recipe: Recipe, key: str, dimension: Dimension) -> Any:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if not isinstance(dimension, Range):
        return CategoricalDistribution(dimension)
    if takes_whole_numbers(recipe, key, dimension):
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(float(dimension.low), float(dimension.high), log=dimension.log)


def _mend(journal: Path) -> None:
    """Take away what a killed process left: its lock, and a line that it had begun."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink()
    if journal.exists():
        whole = journal.read_bytes().rfind(b"\n") + 1
        os.truncate(journal, whole)
