"""Whatever has changed since a lens was built: the answer is refused, or right."""

import pytest

from benchmarks.robustness import still_true
from tests.conftest import made_once


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    return made_once(tmp_path_factory, "still-true", still_true.make)


@pytest.mark.parametrize("variant", still_true.VARIANTS, ids=lambda one: f"{one.group}: {one.name}")
def test_what_has_changed_since(trees, tmp_path, variant):
    found = still_true.outcome(variant, trees, tmp_path / "changed")
    assert found["outcome"] == found["wanted"], found["says"]
    if found["outcome"] == "refused":
        assert len(found["says"]) > 40
