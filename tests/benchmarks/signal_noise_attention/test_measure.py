"""The runs of the training script."""

import json
from pathlib import Path

from benchmarks.signal_noise_attention.measure import VARIANTS, recipe_of, slug
from prismlm.training import build_recipe


def test_every_variant_is_a_recipe_and_another_one():
    assert len({slug(variant) for variant in VARIANTS}) == len(VARIANTS)
    recipes = [recipe_of(variant, Path("c"), 0) for variant in VARIANTS]
    assert len({json.dumps(recipe) for recipe in recipes}) == len(VARIANTS)
    for recipe in recipes:
        build_recipe(recipe | {"out": "o"})
