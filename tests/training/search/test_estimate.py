"""What a search will take."""

import pytest

from prismlm.training import build_recipe, estimate_search


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
