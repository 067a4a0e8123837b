"""prismlm index --dataset and the dry runs of datasets, from local copies: no network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Corpus
from prismlm.lens.layout import read_meta
from tests.helpers import forked


@pytest.fixture(scope="module")
def folder(tiny_corpus, tmp_path_factory) -> Path:
    """The documents of the tiny corpus as a dataset of two files."""
    directory = tmp_path_factory.mktemp("folder") / "stories"
    directory.mkdir()
    rows = pq.read_table(tiny_corpus.parent / "documents.parquet").rename_columns(
        {"text": "body", "id": "key"}
    )
    half = len(rows) // 2
    pq.write_table(rows.slice(0, half), directory / "train-0.parquet")
    pq.write_table(rows.slice(half), directory / "train-1.parquet")
    return directory


@pytest.fixture
def bare(tiny_model, tmp_path) -> Path:
    """The tiny model without a lens."""
    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    shutil.rmtree(copy / "lens")
    return copy


def listing(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): path.stat().st_mtime_ns
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_dataset_is_built_and_indexed_as_its_files_would_be(
    prism, refused, tiny_model, tiny_corpus, bare, folder
):
    columns = ["--column", "text=body", "--column", "id=key"]
    arguments = ["index", bare, "--dataset", folder, *columns, "--contexts", 8]
    arguments += ["--precision", "float32", "--json"]
    result = prism(*arguments)
    assert result.returncode == 0, result.stderr
    corpus = Corpus.open(bare / "corpora" / "stories-train")
    # The same documents, sources and tokenizer: the tiny corpus again.
    assert corpus.fingerprint == Corpus.open(tiny_corpus).fingerprint
    lens = bare / "lens" / "stories-train"
    assert json.loads(result.stdout)["lens"] == str(lens)
    assert read_meta(lens).trained_on is True
    for name in ("index.parquet", "contexts.safetensors", "mass.parquet"):
        expected = (tiny_model / "lens" / "sample" / name).read_bytes()
        assert (lens / name).read_bytes() == expected, name
    assert "Tokenising" in result.stderr

    # The same corpus again for another lens, without reading the dataset.
    before = listing(corpus.path)
    again = prism(*arguments, "--lens", "other", "--split", "heldout")
    assert again.returncode == 0, again.stderr
    assert "Tokenising" not in again.stderr
    assert listing(corpus.path) == before
    message = refused(*arguments[:-1], "--lens", "third", "--column", "source=domain")
    assert "columns: {'text': 'body', 'id': 'key'} → " in message
    assert "--overwrite" in refused(*arguments)


def test_dry_runs_write_nothing_and_say_what_they_cannot_know(prism, bare, folder, tmp_path):
    before = listing(tmp_path)
    columns = ["--column", "text=body", "--column", "id=key"]
    index = ["index", bare, "--dataset", folder, *columns, "--dry-run"]
    found = json.loads(prism(*index, "--json").stdout)
    # The sample is all there is, so that the amounts are those of the corpus, and exact.
    assert found["corpus"]["sampled_documents"] == found["corpus"]["documents"] > 300
    assert found["unknown"] == []
    read = found["corpus"]["tokens"] - found["corpus"]["documents"]
    # What is held out goes by ids, and by what documents say themselves.
    assert found["tokens"] == pytest.approx(0.95 * read, rel=0.05)
    assert found["seconds"] == pytest.approx(found["tokens"] / found["tokens_per_second"])
    assert "tokens per second" in prism(*index).stdout
    assert listing(tmp_path) == before


def test_what_cannot_be_used(prism, refused, bare, folder, tmp_path):
    index = ["index", bare, "--dataset"]
    offline = refused(*index, "no-one/nothing")
    assert "no-one/nothing cannot be reached" in offline
    assert "HF_HUB_OFFLINE" in offline
    assert "the columns are: body," in refused(*index, folder)
    assert "'tset'" in refused(*index, folder, "--dataset-split", "tset")
    assert "Available: ['default']" in refused(*index, f"{folder}:no-such")
    assert "--column is 'texts'" in refused(*index, folder, "--column", "texts=body")
    assert "expected ROLE=NAME" in refused(*index, folder, "--column", "body")
    assert "none.jsonl" in refused(*index, "json", "--data-files", tmp_path / "none.jsonl")
    assert "cannot be read" in refused(*index, folder / "nothing")
    assert "name a --corpus, or a --dataset" in refused("index", bare)
    assert "--dataset: name it" in refused("index", bare, "--data-files", "x")
    assert "reads 512" in refused(*index, folder, "--window", 4000)
    assert not (bare / "corpora").exists() or list((bare / "corpora").iterdir()) == []
    assert not (bare / "lens").exists()


def test_datasets_that_is_not_installed(bare, tmp_path):
    without = "import sys; sys.modules['datasets'] = None\n"
    result = forked.run("index", bare, "--dataset", "x", code=without + forked.COMMAND)
    assert result.returncode == 2
    assert "pip install 'prismlm[datasets]'" in result.stderr
