"""What a recipe may be searched over, and the recipe that a choice of values comes to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from prismlm.errors import InputError, suggest
from prismlm.training.dimensions import Range, Scalar, ends_of
from prismlm.training.recipe import Recipe
from prismlm.training.recipe_values import flat, recipe_from, section_of

# Why a key cannot be searched over.
FIXED = {
    "corpus": "all trials read one corpus",
    "out": "the search chooses where trials are written",
    "seed": "search.seeds says how many seeds each trial is averaged over",
    "device": "it is no hyper-parameter",
    "parallel": "it is no hyper-parameter",
    "data.length": "held-out text is measured in windows of it, so trials would not compare",
    "search": "it is the search itself",
    "evaluation": "trials are compared by what it measures",
    "checkpoint": "it is no hyper-parameter",
    "logging": "it is no hyper-parameter",
}
OF_THE_HEAD = ("head.", "losses.", "optimizer.head_")
# Counted in steps; they keep their share of a run where a trial has more or fewer.
IN_STEPS = (
    "steps",
    "head.initialise_at_step",
    "head.revive_every",
    "evaluation.every",
    "checkpoint.every",
)


def check_space(recipe: Recipe, source: str = "recipe") -> None:
    """Check that every key of a recipe's search space is one, and takes every choice and end.

    Raises:
        InputError: an unknown key, one that cannot be searched over, or a value that the recipe
            does not take.
    """
    for key, dimension in recipe.search.dimensions().items():
        where = f"{source}: search.space"
        _check_key(recipe, key, where)
        for value in ends_of(dimension):
            recipe_of(recipe, {key: value}, source=where)


def check_measured(recipe: Recipe) -> None:
    """Check that every key of a recipe's search space can change what trials are compared by.

    Raises:
        InputError: one is of the head, and nothing of the head reaches the model.
    """
    space = recipe.search.space
    if "head.detach" in space or (recipe.head.enabled and not recipe.head.detach):
        return
    for key in space:
        if key.startswith(OF_THE_HEAD):
            raise InputError(
                f"search.space: {key} does not change the cross-entropy that trials are compared "
                "by, since nothing of the head reaches the model. Leave it out, or set "
                "head.enabled to true and head.detach to false."
            )


def recipe_of(
    recipe: Recipe,
    values: Mapping[str, Scalar],
    *,
    seed: int | None = None,
    out: Path | None = None,
    source: str = "search.space",
) -> Recipe:
    """Return a recipe with other values, as long as the given one in positions trained on.

    Where a step takes more or fewer positions than before, all that is counted in steps is scaled,
    unless ``steps`` is among the values: every trial sees as much text.

    Raises:
        InputError: the values make no recipe; it names ``source`` and the key.
    """
    settings = recipe.to_dict()
    for key, value in values.items():
        _place(settings, key, value)
    settings["seed"] = recipe.seed if seed is None else seed
    settings["out"] = str(recipe.out if out is None else out)
    changed = recipe_from(settings, source, {})
    ratio = recipe.positions_per_step / changed.positions_per_step
    if "steps" in values or ratio == 1:
        return changed
    for key, count in flat(settings).items():
        if key in IN_STEPS and count:
            _place(settings, key, max(1, round(count * ratio)))
    head = settings["head"]
    if head["initialise_at_step"] is not None and settings["steps"]:
        # Rounding may have put it at the end of a very short run.
        head["initialise_at_step"] = min(head["initialise_at_step"], settings["steps"] - 1)
    return recipe_from(settings, source, {})


def takes_whole_numbers(recipe: Recipe, key: str, dimension: Range) -> bool:
    """Say whether a range holds whole numbers only: by its ends, unless the key takes others."""
    if key.startswith("model."):
        return dimension.whole
    *sections, name = key.split(".")
    annotation = section_of(sections).model_fields[name].annotation
    return dimension.whole and float not in (annotation, *get_args(annotation))


def _check_key(recipe: Recipe, key: str, where: str) -> None:
    why = _why_fixed(key)
    if why is not None:
        raise InputError(f"{where}: {key} cannot be searched over: {why}. Leave it out.")
    # Those of the model are its own, which building it checks.
    known = sorted(
        key
        for key in flat(recipe.to_dict())
        if not key.startswith("model.") and _why_fixed(key) is None
    )
    of_the_model = key.startswith("model.") and key.count(".") == 1
    if not of_the_model and key not in known:
        raise InputError(
            f"{where}: there is no recipe key {key!r}.{suggest(key, known)} Known: "
            f"{', '.join(known)}, and model.NAME for the model's own."
        )


def _why_fixed(key: str) -> str | None:
    return next((why for fixed, why in FIXED.items() if f"{key}.".startswith(f"{fixed}.")), None)


def _place(settings: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for part in sections:
        settings = settings[part]
    settings[name] = value
