"""How long the explorer takes: percentiles, and what the first view loads."""

import pytest

from benchmarks.explorer.server import percentile


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.99, 9.0)]
)
def test_a_percentile_is_the_smallest_value_that_reaches_its_share(share, expected):
    assert percentile([9.0, 1.0, 4.0, 2.0], share) == expected


def test_two_late_ones_of_two_hundred_are_beyond_p99():
    seconds = [*range(1, 199), 1000, 1000]
    assert percentile(seconds, 0.99) == 198
    assert percentile([*seconds, 1000], 0.99) == 1000
