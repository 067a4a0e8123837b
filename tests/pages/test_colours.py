"""Every category has a colour."""

from prismlm.lens.labels.contexts import CATEGORIES
from prismlm.pages.colours import COLOURS, NONE, colour


def test_every_category_has_a_colour():
    assert set(COLOURS) == set(CATEGORIES)
    assert colour(None) == colour("") == NONE
    # One that is not of the fourteen has the same each time.
    assert colour("Cooking") == colour("Cooking") in COLOURS.values()
