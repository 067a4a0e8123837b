"""A map is the same each time, and its figure is that of a count by hand."""

import shutil

import numpy as np
import pytest

import prismlm
from prismlm.errors import InputError
from prismlm.lens.labels.map import laid_out, map_lens, regions
from prismlm.lens.labels.write import write_columns
from tests.helpers.lens_files import named_model


def test_too_few_prototypes_for_a_map_are_refused():
    with pytest.raises(InputError, match="more than 15 prototypes, not 4"):
        laid_out(np.zeros((4, 5)))


def test_regions_are_named_by_their_category(tiny_model, tmp_path):
    """Three clusters of 64: two of a category, and one of none."""
    lens = named_model(tiny_model, tmp_path / "model").lens
    kinds = ["Morphology"] * 40 + ["Misc / Other"] * 24 + ["Numbers / Time"] * 64
    columns = {
        "x": np.repeat([0.0, 50, 100], 64) + np.arange(192) % 8,
        "y": np.arange(192) // 8 % 8,
        "category": kinds + ["Misc / Other"] * 64,
    }
    write_columns(lens, columns, map={"method": "by hand"})
    centers = {name: x for x, _, name in regions(lens)}
    assert set(centers) == {"Morphology", "Numbers / Time"}
    assert centers["Morphology"] < 20 < 50 <= centers["Numbers / Time"] <= 57


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
