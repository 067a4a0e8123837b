"""The tiny model, opened for each file: tests may change it."""

import numpy as np
import pytest

import prismlm


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


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
