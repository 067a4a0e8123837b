"""What the map is timed on has groups, and a map shows them."""

import pytest

from benchmarks.explorer.map_layout import drawn, group_neighbours, near
from prismlm.labels.map import laid_out, nearest_prototypes


@pytest.mark.slow
def test_drawn_prototypes_are_in_groups():
    prototypes, groups = drawn(240, 1600, 4)
    nearest = nearest_prototypes(prototypes)
    assert near(nearest.indices, groups) > 0.8
    same, chance = group_neighbours(laid_out(prototypes, nearest), groups)
    assert same > 0.8
    assert chance < 0.3
