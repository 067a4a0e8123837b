"""Categories have colours that any eye tells apart."""

import itertools

import numpy as np
import pytest

from prismlm.lens.labels.categories import CATEGORIES
from prismlm.pages.colours import COLOURS, NONE, colour

# What eyes without one kind of cone see of linear RGB (Machado et al. 2009, severity 1).
EYES = {
    "all cones": (np.eye(3), 0.1),
    "no red cones": (
        [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
        0.07,
    ),
    "no green cones": (
        [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
        0.07,
    ),
    "no blue cones": (
        [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9309, 0.1476], [0.0047, 0.6914, 0.3039]],
        0.07,
    ),
}
TO_LMS = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
TO_LAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])


def linear(colour):
    """Return the linear RGB of ``#rrggbb``."""
    s = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("eyes", EYES)
def test_any_two_categories_and_none_can_be_told_apart(eyes):
    seen, least = EYES[eyes]
    lab = {
        name: TO_LAB @ np.cbrt(TO_LMS @ (seen @ linear(colour(name))).clip(0, 1))
        for name in (*CATEGORIES, None)
    }
    for one, other in itertools.combinations(lab, 2):
        assert np.linalg.norm(lab[one] - lab[other]) > least, (one, other)


def test_every_category_has_a_colour():
    assert set(COLOURS) == set(CATEGORIES)
    assert colour(None) == colour("") == NONE
    # One that is not of the fourteen has the same each time.
    assert colour("Cooking") == colour("Cooking") in COLOURS.values()
