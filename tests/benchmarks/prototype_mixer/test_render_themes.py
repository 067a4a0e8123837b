"""Differences of means that are read from histograms, by hand."""

import pytest

from benchmarks.prototype_mixer.render_themes import difference


def figures(own, random):
    return {"histogram": histogram(own), "random_histogram": histogram(random)}


def histogram(values):
    return [values.count(value) for value in range(1, 11)]


def test_differences_are_of_means_and_beyond_random_sequences():
    # Means 6 and 2, at random 3 and 1: 4 apart, and 3 − 1 = 2 beyond what is there at random.
    pair = [figures([5, 6, 7] * 20, [3] * 60), figures([1, 2, 3] * 20, [1] * 60)]
    plain, beyond = (difference(pair, random=random) for random in (False, True))
    assert plain.value == pytest.approx(4)
    assert beyond.value == pytest.approx(2)
    for one in (plain, beyond):
        assert one.low < one.value < one.high < one.value + 0.5


def test_as_good_as_each_other_is_no_difference():
    pair = [figures([1, 10] * 10, [1] * 20), figures([1, 10] * 10, [1] * 20)]
    found = difference(pair, random=False)
    assert found.value == 0
    assert found.low < 0 < found.high
