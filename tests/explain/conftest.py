"""The tiny model with a lens of few documents, opened for each file: tests may change it."""

import shutil

import numpy as np
import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.lens.build import IndexOptions, build_index
from tests.conftest import made_once


def shares_of(sources):
    """Return the share of each key of a table, or of a list of a row or summary."""
    if isinstance(sources, list):
        return {item["key"]: item["share"] for item in sources}
    return {item.key: item.share for item in sources.items}


@pytest.fixture(scope="session")
def small_model(tiny_model, short_corpus, tmp_path_factory):
    """The tiny model with a lens of one in five of its documents. Copy it to change it."""

    def indexed(directory):
        path = shutil.copytree(
            tiny_model, directory / "small", ignore=shutil.ignore_patterns("lens")
        )
        lm = prismlm.load(path)
        options = IndexOptions(contexts=8, window=128, stride=96)
        corpus = Corpus.open(short_corpus)
        build_index(lm.model, lm.head, corpus, path / "lens" / "sample", options, trained_on=True)
        return path

    return made_once(tmp_path_factory, "small-model", indexed)


@pytest.fixture(scope="module")
def lm(small_model):
    return prismlm.load(small_model)


@pytest.fixture(scope="module")
def everything(lm):
    """Cell, next token, place, state and last token of every record, by reading every range."""
    cells = lm.lens.cells
    keys, starts = map(np.asarray, cells.keys_and_starts)
    owner = np.repeat(keys, np.diff(np.append(starts, len(cells))))
    records = cells.records(np.arange(len(cells)))
    states = records["scale"].astype(np.float64)[:, None] * records["code"] / 127
    position, vocabulary = records["position"], cells.meta.vocabulary
    last = np.array([lm.lens.corpus.tokens(place, 1)[0] for place in position.tolist()])
    return owner // vocabulary, owner % vocabulary, position, states, last
