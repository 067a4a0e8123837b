"""An index by real workers of each engine equals that of one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from prismlm.errors import InputError
from prismlm.lens.build import index
from prismlm.lens.index_parts import IndexPart, index_in_parts
from prismlm.lens.layout import read_meta
from prismlm.lens.options import IndexOptions
from prismlm.parts import Parts
from tests.lens.test_build import assert_same_lens

OPTIONS = IndexOptions(contexts=4, window=32, positions=0.5)


@pytest.fixture(scope="module")
def straight(tiny_model, tiny_corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "lens"
    return index(tiny_model, tiny_corpus, out, OPTIONS, device="cpu")


@pytest.fixture
def part(tiny_model, tiny_corpus, tmp_path):
    return IndexPart(tiny_model, tiny_corpus, tmp_path / "lens", OPTIONS, "cpu")


def test_parts_give_the_lens_of_one_and_finished_ones_are_not_read_again(part, straight):
    replace(part, merge=False)(None, 2, 3)
    finished = Parts(part.lens, 3).part(2)
    before = finished.stat().st_mtime_ns
    replace(part, merge=False)(None, 2, 3)
    part(None, 0, 3)
    assert finished.stat().st_mtime_ns == before
    assert_same_lens(straight, index_in_parts(part, 3))
    assert [path.name for path in part.lens.parent.iterdir()] == ["lens"]
    for number in (0, 1):  # with other options
        replace(part, merge=False, overwrite=True)(None, number, 3)
    index_in_parts(replace(part, overwrite=True, options=replace(OPTIONS, contexts=2)), 3)
    assert read_meta(part.lens).contexts == 2
    with pytest.raises(InputError, match="exists"):
        index_in_parts(part, 3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray", "datatrove"])
def test_workers_of_each_engine_give_the_lens_of_one(part, straight, engine, monkeypatch):
    if engine != "local":
        pytest.importorskip(engine)
    # Workers need not have the current directory of this process.
    monkeypatch.chdir(part.lens.parent)
    part = replace(part, lens=Path("lens"))
    assert_same_lens(straight, index_in_parts(part, 5, engine=engine, workers=2))
