"""A map is the same each time, and its figure is that of a count by hand."""

import shutil

import numpy as np
import pytest
import torch

import prismlm
from prismlm.labels.map import category_neighbours, laid_out, map_lens, nearest_prototypes


def test_neighbours_of_two_groups_by_hand():
    """Two groups far apart, the second with a stranger: 12 of one kind, 11 and 1 of the other."""
    places = np.concatenate([np.random.default_rng(0).random((12, 2)) + shift for shift in (0, 99)])
    categories = ["a"] * 12 + ["b"] * 11 + ["a"]
    same, chance = category_neighbours(places, categories)
    # Each of the 11 has the stranger among its 11 neighbours, and 10 of these are looked at.
    nearest = np.linalg.norm(places[:, None] - places[None], axis=-1).argsort(1)[:, 1:11]
    expected = np.mean(
        [[categories[j] == categories[i] for j in row] for i, row in enumerate(nearest)]
    )
    assert same == pytest.approx(expected)
    assert 0.85 < same < 1
    assert chance < 0.7
    assert category_neighbours(places, [None] * 24) == (None, None)


def test_few_prototypes_lie_on_their_principal_directions():
    points = torch.zeros(4, 5)
    points[:, 3] = torch.tensor([-3.0, -1, 1, 3])
    places = laid_out(points, nearest_prototypes(points))
    assert np.abs(np.diff(places[:, 0])) == pytest.approx([2, 2, 2], abs=1e-5)
    assert places[:, 1] == pytest.approx(0, abs=1e-5)


def test_the_nearest_are_those_of_all_cosines():
    points = torch.randn(600, 7, generator=torch.Generator().manual_seed(0))
    points[3] = 2 * points[580]
    cosines = torch.nn.functional.cosine_similarity(points[:, None], points[None], dim=-1)
    found = nearest_prototypes(points)
    assert found.indices.shape == (600, 15)
    assert found.indices[:, 0].tolist() == list(range(600))
    assert found.indices[3, 1] == 580
    expected = cosines.fill_diagonal_(2).sort(descending=True).values[:, 1:15]
    torch.testing.assert_close(found.distances[:, 1:], 1 - expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_lens_gets_its_map(tiny_model, tmp_path):
    pytest.importorskip("umap")
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    lm = prismlm.load(directory)
    found = map_lens(lm.lens, lm.head)
    table = prismlm.load(directory).lens.prototypes
    assert table["x"].null_count == table["y"].null_count == 0
    assert lm.lens.meta.map == found
    before = table["x"].to_numpy()
    map_lens(lm.lens, lm.head)
    np.testing.assert_array_equal(lm.lens.prototypes["x"].to_numpy(), before)
