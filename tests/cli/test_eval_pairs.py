import json

import pytest

from prismlm.eval.pairs import read_pairs
from tests.helpers.pair_texts import write_texts

FEW = ("--per-slice", 1, "--similarity", 0.5)


@pytest.fixture
def data(tmp_path):
    return write_texts(tmp_path / "data")


def test_two_files_are_written(prism, data, tmp_path):
    out = tmp_path / "out"
    done = prism("eval", "pairs", "--out", out, "--data", data, *FEW, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["pairs"] for row in found["slices"]] == [1] * 10
    assert found["similarity"] == 0.5
    assert len(read_pairs(out / "perturbations.parquet")) == 7
    before = (out / "perturbations.parquet").read_bytes()
    again = prism("eval", "pairs", "--out", out, "--data", data, *FEW)
    assert again.returncode == 2
    assert "replace it with --overwrite" in again.stderr
    assert (out / "perturbations.parquet").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--per-slice", 0], "'--per-slice'"),
        (["--similarity", 2], "'--similarity'"),
        (["--per-slice", 90], "the slice 'synonym' has"),
    ],
)
def test_bad_input_is_refused(refused, data, tmp_path, arguments, words):
    out = tmp_path / "out"
    assert words in refused("eval", "pairs", "--out", out, "--data", data, *arguments)
    assert not out.exists()


def test_a_directory_without_the_corpora_is_refused(refused, tmp_path):
    message = refused("eval", "pairs", "--out", tmp_path / "out", "--data", tmp_path)
    assert "has no wikitext2/*.txt" in message
