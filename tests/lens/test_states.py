"""Hidden states on disk: what they hold, whole blocks up to a limit, and an index from them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.lens.build import IndexOptions, build_index
from prismlm.lens.lens import Lens
from prismlm.lens.options import Shard
from prismlm.lens.states import read_states

OPTIONS = IndexOptions(contexts=4, window=64, stride=48)


@pytest.fixture(scope="module")
def corpus(short_corpus):
    return Corpus.open(short_corpus)


@pytest.fixture(scope="module")
def stored(lm, corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("stored") / "states"
    return read_states(lm.model, corpus, directory, OPTIONS, limit_bytes=1e9)


def indexed(lm, corpus, out, states=None):
    build_index(lm.model, lm.head, corpus, out, OPTIONS, states=states)
    return Lens.open(out, lm.model, lm.head)


def test_every_position_that_predicts_is_stored_once(stored, corpus):
    documents = corpus.split("train")
    expected = []
    for start, length in zip(corpus.starts[documents], corpus.lengths[documents], strict=True):
        expected += corpus.read_tokens(int(start) + 1, int(length) - 1).tolist()
    assert len(stored) == len(expected)
    assert sorted(stored.tokens().tolist()) == sorted(expected)


def test_a_limit_stores_whole_blocks_and_an_index_runs_the_model_for_the_others(
    stored, lm, corpus, tmp_path
):
    directory = tmp_path / "states"
    some = read_states(lm.model, corpus, directory, OPTIONS, limit_bytes=1e5)
    blocks = len(some.ends) - 1
    assert 0 < blocks < len(stored.ends) - 1
    for slot in range(blocks):
        assert torch.equal(some.of_block(slot), stored.of_block(slot))
    assert some.of_block(blocks) is None
    lens = indexed(lm, corpus, tmp_path / "lens", some)
    assert len(lens.cells) == lens.meta.tokens > len(some)
    with pytest.raises(InputError, match="another model, corpus or setting"):
        read_states(lm.model, corpus, directory, replace(OPTIONS, window=48), limit_bytes=1e5)


def test_an_index_from_states_is_nearly_the_index_of_the_model(stored, lm, corpus, tmp_path):
    lenses = [
        indexed(lm, corpus, tmp_path / f"{n}", states) for n, states in enumerate([None, stored])
    ]
    records = [lens.cells.records(np.arange(len(lens.cells))) for lens in lenses]
    # The rounding to bfloat16 moves some positions between neighbouring cells.
    (positions, codes), others = (
        (r["position"][order], r["code"][order].astype(int))
        for r, order in ((r, np.argsort(r["position"])) for r in records)
    )
    np.testing.assert_array_equal(positions, others[0])
    assert np.abs(codes - others[1]).max(1).mean() < 2
    assert lenses[0].meta.tokens == lenses[1].meta.tokens == len(stored)


def test_parts_with_and_without_stored_states_are_not_of_one_lens(stored, lm, corpus, tmp_path):
    out, source = tmp_path / "lens", (lm.model, lm.head, corpus)
    build_index(*source, out, replace(OPTIONS, shard=Shard(0, 2)), states=stored)
    with pytest.raises(InputError, match="another input"):
        build_index(*source, out, replace(OPTIONS, shard=Shard(1, 2)))
