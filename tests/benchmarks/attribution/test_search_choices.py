import numpy as np
import pytest

from benchmarks.attribution.search_choices import choices, halves, mean_with_error


def test_what_is_tried_makes_sense():
    tried = list(choices())
    assert len(set(tried)) == len(tried) > 100
    assert not any(choice.cells is None and choice.spread != "jointly" for choice in tried)
    assert any(choice.signed for choice in tried)


def test_halves_are_drawn_by_seed():
    first = halves(9, seed=1)
    assert first.sum() == 4
    assert np.array_equal(first, halves(9, seed=1))
    assert not np.array_equal(first, halves(9, seed=2))


def test_mean_with_its_error():
    found = mean_with_error(np.array([1.0, 3.0, 5.0, 7.0]))
    assert found["mean"] == 4
    # Of a sample the variance is 20 / 3, of a mean of four a quarter of that.
    assert found["error"] == pytest.approx(np.sqrt(20 / 12))
