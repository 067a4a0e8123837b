import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from prismlm.errors import InputError
from prismlm.training.prototypes import spherical_kmeans


def plain_kmeans(vectors, centres, iterations):
    """The same, one vector after the other."""
    unit = F.normalize(vectors, dim=-1)
    centres = F.normalize(centres, dim=-1)
    for _ in range(iterations):
        nearest = []
        for vector in unit:
            cosines = [float(vector @ centre) for centre in centres]
            best = max(range(len(cosines)), key=lambda i: (cosines[i], -i))
            nearest.append((cosines[best], best))
        worst = sorted(range(len(unit)), key=lambda n: nearest[n][0])
        moved = []
        for i in range(len(centres)):
            members = [unit[n] for n, (_, owner) in enumerate(nearest) if owner == i]
            total = torch.stack(members).sum(0) if members else unit[worst.pop(0)]
            moved.append(F.normalize(total, dim=-1))
        centres = torch.stack(moved)
    return centres


def test_two_pairs_of_directions_by_hand():
    # Angles 0°, 20°, 90°, 130°, of any length; centres start on the first two vectors.
    angles = torch.tensor([0.0, 20.0, 90.0, 130.0]) * math.pi / 180
    vectors = torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([[1], [5], [2], [0.1]])
    one = spherical_kmeans(vectors, vectors[:2], 1)
    # At first 20°, 90° and 130° belong to the second centre; its mean direction is near 81°.
    sums = angles[1:].cos().sum(), angles[1:].sin().sum()
    turned = math.atan2(sums[1], sums[0])
    torch.testing.assert_close(one[0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(one[1], torch.tensor([math.cos(turned), math.sin(turned)]))
    # Then 20° goes over to the first.
    expected = torch.tensor([10.0, 110.0]) * math.pi / 180
    found = spherical_kmeans(vectors, vectors[:2], 3)
    torch.testing.assert_close(found, torch.stack([expected.cos(), expected.sin()], 1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 5), st.integers(0, 4), st.data())
def test_it_is_the_plain_loop(count, more, width, iterations, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    vectors = torch.randn(count + more, width + 1, generator=generator)
    start = vectors[torch.randperm(len(vectors), generator=generator)[:count]]
    quick = spherical_kmeans(vectors, start, iterations)
    torch.testing.assert_close(quick, plain_kmeans(vectors, start, iterations))


def test_an_empty_centre_moves_to_the_worst_placed_vector():
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 1.0]])
    centres = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -5.0]])
    found = spherical_kmeans(vectors, centres, 1)
    torch.testing.assert_close(found[2], torch.tensor([-1.0, 1.0]) / math.sqrt(2))


def test_what_cannot_be_clustered_is_named():
    with pytest.raises(InputError, match="3 vectors for 4 centres"):
        spherical_kmeans(torch.ones(3, 2), torch.ones(4, 2), 1)
