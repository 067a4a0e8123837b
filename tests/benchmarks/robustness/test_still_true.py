"""Whatever has changed since a lens was built: the answer is refused, or right."""

import random

import pytest

from benchmarks.robustness import still_true
from tests.conftest import made_once

FILES = [
    *(f"{still_true.LENS}/{name}" for name in ("meta.json", "suffixes-order.npy", "cells.npy")),
    *(f"corpus/{name}" for name in ("documents-00000.parquet", "text-00000.parquet")),
]


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    return made_once(tmp_path_factory, "still-true", still_true.make)


@pytest.mark.parametrize("variant", still_true.VARIANTS, ids=lambda one: f"{one.group}: {one.name}")
def test_what_has_changed_since(trees, tmp_path, variant):
    found = still_true.outcome(variant, trees, tmp_path / "changed")
    assert found["outcome"] == found["wanted"], found["says"]
    if found["outcome"] == "refused":
        assert len(found["says"]) > 40


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_or_changes_nothing(trees, tmp_path, name):
    found = still_true.flipped(trees / "plain", name, 12, random.Random(name), tmp_path / "flips")
    assert found["wrong"] == []
