"""Exact tests over cases, against enumeration."""

import itertools
import math

import pytest

from prismlm.instruments.channels.chance import median_interval, rank_among, rank_sum_p


def test_ranks():
    assert rank_among(2.0, [1.0, 3.0, 2.0]) == 1.5
    assert rank_among(0.0, [1.0]) == 0


@pytest.mark.parametrize(("ranks", "others"), [([2, 1, 2], 2), ([0.5, 3, 1], 3), ([0, 0], 4)])
def test_the_rank_sum_is_that_of_every_way_to_rank(ranks, others):
    ways = [sum(way) for way in itertools.product(range(others + 1), repeat=len(ranks))]
    expected = sum(way >= sum(ranks) for way in ways) / len(ways)
    assert rank_sum_p(ranks, others) == pytest.approx(expected)


def test_with_one_control_it_is_the_sign_test():
    expected = sum(math.comb(10, k) for k in (8, 9, 10)) / 2**10
    assert rank_sum_p([1] * 8 + [0] * 2, 1) == pytest.approx(expected)


def test_the_median_has_an_interval_from_six_values_on():
    assert median_interval([3, 1, 2, 5, 4]) is None
    assert median_interval([6, 1, 2, 5, 4, 3]) == (1, 6)
    # The textbook's: 20 values, the 6th and the 15th.
    assert median_interval(range(1, 21)) == (6, 15)
