"""What a search found, and the files that say so."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from prismlm.files import atomic_file, write_json
from prismlm.outputs import put_csv
from prismlm.training.dimensions import Scalar
from prismlm.training.evaluation import perplexity
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import BEST_FILE

RESULTS_FILE = "search.json"
TABLE_FILE = "search.csv"
BEST_MODEL = "best"
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
    """

    number: int
    values: dict[str, Scalar]
    seeds: tuple[SeedOutcome, ...]

    @property
    def state(self) -> Literal["complete", "failed"]:
        """Whether every run gave a finite cross-entropy."""
        return "complete" if self.failed is None else "failed"

    @property
    def failed(self) -> str | None:
        """Why the trial failed, or None."""
        return next((seed.failed for seed in self.seeds if seed.ce is None), None)

    @property
    def ce(self) -> float | None:
        """The objective: the mean over the seeds; None if the trial failed."""
        found = self._all()
        return None if found is None else statistics.fmean(found)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n − 1); None for one seed or a failed trial."""
        found = self._all()
        return None if found is None or len(found) < 2 else statistics.stdev(found)

    @property
    def perplexity(self) -> float | None:
        """exp of the objective; None if the trial failed, or where that is beyond any number."""
        value = math.inf if self.ce is None else perplexity(self.ce)
        return value if math.isfinite(value) else None

    def _all(self) -> list[float] | None:
        found = [seed.ce for seed in self.seeds if seed.ce is not None]
        return found if found and len(found) == len(self.seeds) else None

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        return {
            "trial": self.number,
            "state": self.state,
            "ce": self.ce,
            "deviation": self.deviation,
            "perplexity": self.perplexity,
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
        """The completed trials, the best first."""
        complete = [
            (trial.ce, trial.number, trial) for trial in self.trials if trial.ce is not None
        ]
        return [trial for *_, trial in sorted(complete)]

    @property
    def best(self) -> TrialResult | None:
        """The trial with the least objective, the earlier of equals; None if all failed."""
        return self.ranked[0] if self.ranked else None

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


def write_results(result: SearchResult, noted: dict[str, Any], best: Recipe | None) -> None:
    """Write ``search.json``, ``search.csv`` and, if a trial is complete, ``best.yaml``.

    Args:
        result: the trials so far.
        noted: what the search is: recipe, space, corpus, versions.
        best: the recipe of its best trial.
    """
    if best is not None and result.best is not None:
        _write_best(result, result.best, best)
    keys = list(noted["search"]["space"])
    columns = ["trial", "state", "ce", "deviation", "perplexity", *keys, "seeds", "failed"]
    with atomic_file(result.directory / TABLE_FILE) as temporary:
        put_csv(temporary, columns, (_row(trial, columns) for trial in result.trials))
    write_json(result.directory / RESULTS_FILE, noted | result.to_dict())


def _write_best(result: SearchResult, trial: TrialResult, recipe: Recipe) -> None:
    runs = f"{len(trial.seeds)} seeds" if len(trial.seeds) > 1 else "one seed"
    tried = len(result.trials)
    head = (
        f"# The best of {tried} trials of a search: trial {trial.number}, held-out cross-entropy\n"
        f"# {trial.ce:.4f}, the mean of {runs}. The others are in {RESULTS_FILE}.\n\n"
    )
    with atomic_file(result.best_recipe) as temporary:
        text = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)
        temporary.write_text(head + text, encoding="utf-8")


def _row(trial: TrialResult, columns: list[str]) -> dict[str, Any]:
    seeds = " ".join("failed" if seed.ce is None else repr(seed.ce) for seed in trial.seeds)
    row = trial.to_dict() | trial.values | {"seeds": seeds}
    return {name: row[name] for name in columns}
