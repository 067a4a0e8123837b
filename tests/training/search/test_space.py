"""What a search may choose from, and the recipes of its trials."""

import pytest

from prismlm.errors import InputError
from prismlm.training import build_recipe, estimate_search, search
from prismlm.training.dimensions import Range
from prismlm.training.search.space import (
    check_measured,
    check_space,
    recipe_of,
    takes_whole_numbers,
)
from tests.helpers.toy_search import with_search


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"optimizer.learning_rat": [1e-3, 1e-2]}, "Did you mean 'optimizer.learning_rate'?"),
        ({"model.num_chanels": [4, 8]}, "Did you mean 'num_channels'?"),
        ({"model": [4, 8]}, "no recipe key 'model'"),
        ({"optimizer.learning_rate": {"low": 1e-3, "high": 1e-3}}, "is empty: low is 0.001"),
        ({"optimizer.learning_rate": {"low": 1e-2, "high": 1e-3}}, "expected low < high"),
        ({"optimizer.learning_rate": {"low": 0, "high": 1, "log": True}}, "has to be above 0"),
        ({"optimizer.learning_rate": {"low": -1, "high": 1, "log": True}}, "has to be above 0"),
        ({"optimizer.learning_rate": {"lo": 1, "high": 2}}, "Did you mean 'low'?"),
        ({"optimizer.learning_rate": {"low": 1e-3}}, "high is None: expected a finite number"),
        ({"optimizer.learning_rate": {"low": -1.0, "high": 1.0}}, "learning_rate is -1.0"),
        ({"optimizer.learning_rate": 3e-3}, "expected a list of choices, or a range"),
        ({"batch_size": [4]}, "at least two choices, all different"),
        ({"batch_size": [4, 4]}, "at least two choices, all different"),
        ({"batch_size": []}, "at least two choices"),
        ({"batch_size": [4, 8.5]}, "batch_size is 8.5"),
        ({"batch_size": [[4], [8]]}, "expected a number, a text, true or false"),
        ({"optimizer.schedule": ["cosine", "steps"]}, "optimizer.schedule is 'steps'"),
        ({"seed": [1, 2]}, "search.seeds says how many"),
        ({"data.length": [32, 64]}, "in windows of it"),
        ({"evaluation.final_tokens": [10, 20]}, "cannot be searched over"),
        ({}, "search.space"),
    ],
)
def test_a_wrong_space_names_the_key_and_what_is_allowed(toy, space, expected):
    with pytest.raises(InputError) as error:
        build_recipe(with_search(toy, space=space), "recipe.yaml")
    assert expected in str(error.value)
    assert "recipe.yaml" in str(error.value)
    assert "search" in str(error.value)


@pytest.mark.parametrize(
    ("key", "whole"),
    [
        ("batch_size", True),
        ("head.anneal_from", True),
        ("model.num_channels", True),
        ("optimizer.weight_decay", False),
        ("noise_weight.initial", False),
    ],
)
def test_a_range_is_of_whole_numbers_where_its_key_is(toy, key, whole):
    assert takes_whole_numbers(build_recipe(toy), key, Range(0, 1)) == whole


def test_what_cannot_change_the_objective_is_not_searched(toy):
    settings = with_search(toy, space={"head.scale": [1.0, 2.0]})
    # The plain run takes the recipe as it is.
    recipe = build_recipe(settings)
    for refuses in (search, estimate_search):
        with pytest.raises(InputError, match="nothing of the head reaches the model"):
            refuses(recipe)
    reaching = {"enabled": True, "detach": False}
    check_measured(build_recipe(settings | {"head": settings["head"] | reaching}))
    also = {"head.detach": [True, False], "head.scale": [1.0, 2.0]}
    check_measured(build_recipe(with_search(toy, space=also)))


def test_wrong_settings_of_a_search_are_named(toy):
    for change, expected in (
        ({"trials": 0}, "search.trials is 0"),
        ({"seed": 3}, "there is no setting 'search.seed'. Did you mean 'seeds'?"),
        ({"sampler": "gp"}, "search.sampler is 'gp'"),
    ):
        with pytest.raises(InputError) as error:
            build_recipe(with_search(toy, **change))
        assert expected in str(error.value)


def test_a_recipe_without_a_section_is_searched_as_the_source_did(toy):
    del toy["search"]
    recipe = build_recipe(toy)
    section = recipe.search
    assert (section.trials, section.startup_trials, section.seeds) == (50, 15, 3)
    assert section.sampler == "botorch"
    assert section.space == {
        "batch_size": [32, 64, 128],
        "optimizer.learning_rate": {"low": 3e-5, "high": 3e-2, "log": True},
    }
    check_space(recipe)
    assert "search" not in recipe.to_dict()


def test_trials_of_other_batches_train_on_as_many_positions(toy):
    toy |= {"steps": 400, "checkpoint": {"every": 100}, "evaluation": {"every": 50}}
    toy["head"] |= {"enabled": True, "detach": False, "initialise_at_step": 30}
    recipe = build_recipe(toy)
    larger = recipe_of(recipe, {"batch_size": 8})
    assert larger.positions_per_step * larger.steps == recipe.positions_per_step * recipe.steps
    assert (larger.steps, larger.checkpoint.every, larger.evaluation.every) == (200, 50, 25)
    assert larger.head.initialise_at_step == 15
    # So short a run has its prototypes placed before its only step.
    short = build_recipe(toy | {"steps": 5, "head": toy["head"] | {"initialise_at_step": 4}})
    tiny = recipe_of(short, {"batch_size": 32})
    assert (tiny.steps, tiny.head.initialise_at_step) == (1, 0)
    assert recipe_of(recipe, {"gradient_accumulation": 2, "batch_size": 2}).steps == 400
    assert recipe_of(recipe, {"steps": 100, "batch_size": 8}).steps == 100
