from functools import partial
from pathlib import Path

import pytest

from prismlm.corpus import build_corpus, estimate_build
from tests.helpers.records import RECORDS, write_jsonl


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Seventeen documents in several shards."""
    directory = tmp_path_factory.mktemp("corpus")
    path = write_jsonl(directory / "texts.jsonl", RECORDS)
    return build_corpus(path, directory / "built", vocab_size=300, parts=6, heldout_fraction=0.3)


@pytest.fixture
def make(tiny_corpus, tmp_path):
    """Call a function on inputs, or rows, with an output and the tokenizer of `tiny_corpus`."""

    def make(function, out="out", *, inputs=None, rows=None, **options):
        if rows is not None:
            inputs = write_jsonl(tmp_path / "texts.jsonl", rows)
        options = {"tokenizer": tiny_corpus / "tokenizer"} | options
        return function(inputs, tmp_path / out, **options)

    return make


@pytest.fixture
def build(make):
    return partial(make, build_corpus)


@pytest.fixture
def estimate(make):
    return partial(make, estimate_build)


@pytest.fixture
def store(tmp_path):
    """Copy a directory to a store of fsspec that is not this disk."""
    root = pytest.importorskip("upath").UPath(f"memory://{tmp_path.name}")

    def copy(directory):
        for path in filter(Path.is_file, directory.rglob("*")):
            target = root / path.relative_to(directory).as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        return root

    return copy
