"""The runs of the training script."""

import json

from benchmarks.signal_noise_attention import measure as signal_noise_training
from benchmarks.signal_noise_attention.measure import RATED, VARIANTS
from prismlm.training import build_recipe


def test_every_run_is_a_recipe_and_another_one():
    runs = [*signal_noise_training.runs("train"), *signal_noise_training.runs("rates")]
    assert len({run.slug for run in runs}) == len(runs) == len(VARIANTS) + 2 * len(RATED)
    recipes = [signal_noise_training.recipe_of(run, "c", 0) for run in runs]
    assert len({json.dumps(recipe) for recipe in recipes}) == len(runs)
    for recipe in recipes:
        build_recipe(recipe | {"out": "o"})
