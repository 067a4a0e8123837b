"""A map is the same each time, and its figure is that of a count by hand."""

import shutil

import numpy as np
import pytest

import prismlm
from prismlm.errors import InputError
from prismlm.lens.labels.map import (
    first_prototype,
    laid_out,
    map_lens,
    regions,
    words_raised,
)
from prismlm.lens.labels.write import write_columns
from tests.helpers.named_lens import named_model


def test_too_few_prototypes_for_a_map_are_refused():
    with pytest.raises(InputError, match="more than 15 prototypes, and the model has 4"):
        laid_out(np.zeros((4, 5)))


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
