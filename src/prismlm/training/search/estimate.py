"""What a search will take, from what its cheapest and its dearest trial take."""

from __future__ import annotations

from dataclasses import replace

from prismlm.cost import Cost
from prismlm.training.dimensions import Dimension, Scalar, ends_of
from prismlm.training.estimate import estimate
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import SEARCH
from prismlm.training.search.runs import TRIALS
from prismlm.training.search.search import check_search, finished_trials
from prismlm.training.search.space import check_measured, check_space, recipe_of

# What these come to does not change what a step costs.
FREE_OF_COST = ("optimizer.", "losses.")


def estimate_search(recipe: Recipe, *, resume: bool = False) -> Cost:
    """Say what a search will take; nothing is written, and Optuna is not needed.

    Its parts are ``first``, one run with the least number of every key, or the first of choices
    that are none, and ``last``, one with the greatest or the last. Time is the runs left at the
    mean of both, evaluations and the sampler left out; disk is of one run while it lasts, its
    model being removed when it is measured. The figures are ``trials`` in all, ``trials_left``,
    ``runs`` left, ``seconds_least`` and ``seconds_most`` at the quicker and slower of both.

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
    costs = [replace(_estimate(recipe, first), name="first")]
    costly = any(not key.startswith(FREE_OF_COST) for key in dimensions)
    costs.append(replace(_estimate(recipe, last) if costly else costs[0], name="last"))
    search = recipe.search
    left = max(0, search.trials - len(finished_trials(recipe)))
    runs = left * search.seeds
    times = [cost.seconds or 0.0 for cost in costs]
    figures = {
        "trials": search.trials,
        "trials_left": left,
        "runs": runs,
        "seconds_least": runs * min(times),
        "seconds_most": runs * max(times),
    }
    return Cost(
        runs * sum(times) / 2,
        max(cost.memory_bytes for cost in costs),
        max(cost.disk_bytes or 0 for cost in costs),
        figures,
        parts=tuple(costs),
        basis=f"{costs[0].basis} From the first and the last value of each key; evaluations and "
        "the sampler are left out.",
    )


def _extremes(dimension: Dimension) -> tuple[Scalar, Scalar]:
    """Return the least and the greatest number; of other choices the first and the last."""
    values = ends_of(dimension)
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        return values[0], values[-1]
    return min(numbers), max(numbers)


def _estimate(recipe: Recipe, values: dict[str, Scalar]) -> Cost:
    # A directory that no trial is in.
    out = recipe.out / SEARCH / TRIALS / "estimate"
    return estimate(recipe_of(recipe, values, out=out))
