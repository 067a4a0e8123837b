"""What a search will take."""

import pytest

from prismlm.training import build_recipe, estimate_search
from tests.helpers.toy_search import with_search


def test_the_estimate_counts_every_run_and_writes_nothing(toy):
    recipe = build_recipe(toy | {"steps": 64})
    expected = estimate_search(recipe)
    assert (expected.trials, expected.trials_left, expected.runs) == (3, 3, 6)
    assert (expected.first.steps, expected.last.steps) == (64, 32)
    assert expected.first.tokens == expected.last.tokens
    both = expected.first.seconds + expected.last.seconds
    assert expected.seconds == pytest.approx(6 * both / 2)
    assert expected.seconds_least <= expected.seconds <= expected.seconds_most
    assert not recipe.out.exists()


def test_the_estimate_is_of_the_least_and_greatest_choice_in_any_order(toy):
    space = {"batch_size": [8, 32, 16], "optimizer.schedule": ["linear", "cosine"]}
    found = estimate_search(build_recipe(with_search(toy | {"steps": 64}, space=space)))
    # 64 steps of 4 rows are 32 of 8 and 8 of 32.
    assert (found.first.steps, found.last.steps) == (32, 8)
    assert found.memory_bytes == max(found.first.memory_bytes, found.last.memory_bytes)
