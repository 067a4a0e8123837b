"""What a search will take, from what its cheapest and its dearest trial take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from prismlm.training.dimensions import Dimension, Scalar
from prismlm.training.estimate import TrainingEstimate, estimate
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import SEARCH
from prismlm.training.search.runs import TRIALS
from prismlm.training.search.search import check_search, finished_trials
from prismlm.training.search.space import check_measured, check_space, recipe_of

# What these come to does not change what a step costs.
FREE_OF_COST = ("optimizer.", "losses.")


@dataclass(frozen=True)
class SearchEstimate:
    """What ``prismlm train RECIPE --search`` will take.

    Attributes:
        trials: of the whole search.
        trials_left: those that are not finished yet.
        runs: training runs left, every trial being as many as there are seeds.
        first: one run with the least number of every key, or the first of choices that are none.
        last: one run with the greatest number of every key, or the last of choices that are none.
        seconds: for all runs left, at the mean of both; evaluations and the sampler left out.
        seconds_least: at the quicker of both.
        seconds_most: at the slower of both.
        memory_bytes: the most that either takes.
        disk_bytes: of one run while it lasts; its model is removed when it is measured.
    """

    trials: int
    trials_left: int
    runs: int
    first: TrainingEstimate
    last: TrainingEstimate
    seconds: float
    seconds_least: float
    seconds_most: float
    memory_bytes: int
    disk_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        return asdict(self)


def estimate_search(recipe: Recipe, *, resume: bool = False) -> SearchEstimate:
    """Say what a search will take; nothing is written, and Optuna is not needed.

    Raises:
        InputError: as :func:`prismlm.training.search`, but not for a missing package or GPU.
    """
    check_space(recipe)
    check_measured(recipe)
    check_search(recipe, resume=resume)
    dimensions = recipe.search.dimensions()
    first, last = (
        {key: _extremes(dimension)[end] for key, dimension in dimensions.items()} for end in (0, 1)
    )
    costs = [_estimate(recipe, first)]
    costly = any(not key.startswith(FREE_OF_COST) for key in dimensions)
    costs.append(_estimate(recipe, last) if costly else costs[0])
    search = recipe.search
    left = max(0, search.trials - len(finished_trials(recipe)))
    runs = left * search.seeds
    times = [cost.seconds for cost in costs]
    return SearchEstimate(
        trials=search.trials,
        trials_left=left,
        runs=runs,
        first=costs[0],
        last=costs[1],
        seconds=runs * sum(times) / 2,
        seconds_least=runs * min(times),
        seconds_most=runs * max(times),
        memory_bytes=max(cost.memory_bytes for cost in costs),
        disk_bytes=max(cost.disk_bytes for cost in costs),
    )


def _extremes(dimension: Dimension) -> tuple[Scalar, Scalar]:
    """Return the least and the greatest number; of other choices the first and the last."""
    values = dimension.ends
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        return values[0], values[-1]
    return min(numbers), max(numbers)


def _estimate(recipe: Recipe, values: dict[str, Scalar]) -> TrainingEstimate:
    # A directory that no trial is in.
    out = recipe.out / SEARCH / TRIALS / "estimate"
    return estimate(recipe_of(recipe, values, out=out))
