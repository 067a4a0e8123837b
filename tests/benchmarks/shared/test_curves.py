"""Round numbers on an axis, and a drawing that says them."""

import pytest

from benchmarks.shared.curves import Curve, draw, ticks


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (2, [0, 0.5, 1, 1.5, 2]),
        (5500, [0, 1000, 2000, 3000, 4000, 5000]),
        (6, [0, 2, 4, 6]),
        (19_389_460, [0, 5e6, 10e6, 15e6]),
    ],
)
def test_ticks_are_round(end, expected):
    assert ticks(end) == expected


def test_an_axis_says_thousands_and_millions():
    few, many = (
        draw({"tokens": [Curve("one", "red", [(1, 5.0), (end, 4.0)])]}, top=6)
        for end in (5500, 2.3e6)
    )
    assert ">4,000</text>" in few
    assert ">0</text>" in many
    assert ">1.5 M</text>" in many
