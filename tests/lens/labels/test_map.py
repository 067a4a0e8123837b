"""A map is the same each time, and its figure is that of a count by hand."""

import shutil

import numpy as np
import pytest
import torch

import prismlm
from prismlm.lens.labels.map import (
    first_prototype,
    laid_out,
    map_lens,
    nearest_prototypes,
    regions,
    words_raised,
)
from prismlm.lens.labels.write import write_columns
from tests.helpers.named_lens import named_model


def test_few_prototypes_lie_on_their_principal_directions():
    points = torch.zeros(4, 5)
    points[:, 3] = torch.tensor([-3.0, -1, 1, 3])
    places = laid_out(points)
    assert np.abs(np.diff(places[:, 0])) == pytest.approx([2, 2, 2], abs=1e-5)
    assert places[:, 1] == pytest.approx(0, abs=1e-5)


def test_the_nearest_are_those_of_all_cosines():
    points = torch.randn(600, 7, generator=torch.Generator().manual_seed(0))
    points[3] = 2 * points[580]
    cosines = torch.nn.functional.cosine_similarity(points[:, None], points[None], dim=-1)
    indices, distances = nearest_prototypes(points)
    assert indices.shape == (600, 15)
    assert indices[:, 0].tolist() == list(range(600))
    assert indices[3, 1] == 580
    expected = cosines.fill_diagonal_(2).sort(descending=True).values[:, 1:15]
    np.testing.assert_allclose(distances[:, 1:], 1 - expected, atol=1e-5, rtol=0)


@pytest.fixture
def named(tiny_model, tmp_path):
    return named_model(tiny_model, tmp_path / "model")


def test_regions_are_named_by_their_category_or_their_words(named):
    """Three clusters of 64: one of a category, one of a word, and one of neither."""
    tokens = [[" river", "x"] if 64 <= i < 128 else [" the"] for i in range(192)]
    columns = {
        "x": np.repeat([0.0, 50, 100], 64) + np.arange(192) % 8,
        "y": np.arange(192) // 8 % 8,
        "category": ["Morphology" if i < 40 else "Misc / Other" for i in range(192)],
        "top_tokens": tokens,
        "top_values": [[1.0] * len(row) for row in tokens],
    }
    write_columns(named.lens, columns, map={"method": "by hand"})
    centers = {name: x for x, _, name in regions(named.lens)}
    assert set(centers) == {"Morphology", "river"}
    assert centers["Morphology"] < 20 < 50 <= centers["river"] <= 57


def test_regions_are_not_named_by_word_pieces():
    assert words_raised([[" health", "istant", " the"], ["quired"]]) == [{"health"}, set()]
    assert words_raised([["health", "a1b2c"]]) == [{"health"}]


def test_a_page_opens_at_a_prototype_with_a_good_name_and_a_subject(named):
    lens, scores, kinds = named.lens, [0.5] * 192, ["Named Entities"] * 192
    assert first_prototype(lens) == lens.by_size[0]
    first, _, third, fourth = lens.by_size[:4].tolist()
    scores[first] = scores[third] = scores[fourth] = 0.95
    kinds[first] = "Misc / Other"
    columns = {"label_score": np.array(scores, np.float32), "category": kinds}
    write_columns(lens, columns, map={"method": "by hand"})
    assert first_prototype(prismlm.load(named.path).lens) == third


@pytest.mark.slow
def test_a_lens_gets_its_map(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    lm = prismlm.load(directory)
    found = map_lens(lm.lens, lm.head)
    table = prismlm.load(directory).lens.prototypes
    assert table["x"].null_count == table["y"].null_count == 0
    assert lm.lens.meta.map == found
    before = table["x"].to_numpy()
    map_lens(lm.lens, lm.head)
    np.testing.assert_array_equal(lm.lens.prototypes["x"].to_numpy(), before)
