"""Hidden states kept on disk: what they hold, where reading goes on, and an index from them."""

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
def kept(lm, corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("kept") / "states"
    return read_states(lm.model, corpus, directory, OPTIONS, limit_bytes=1e9)


@pytest.fixture(scope="module")
def read(lm, corpus, tmp_path_factory):
    """The lens that reads every state itself."""
    return indexed(lm, corpus, tmp_path_factory.mktemp("read") / "lens")


def indexed(lm, corpus, out, states=None):
    return Lens.open(
        build_index(lm.model, lm.head, corpus, out, OPTIONS, states=states), lm.model, lm.head
    )


def test_every_position_that_predicts_is_kept_once(kept, corpus):
    documents = corpus.split("train")
    expected = []
    for start, length in zip(corpus.starts[documents], corpus.lengths[documents], strict=True):
        expected += corpus.read_tokens(int(start) + 1, int(length) - 1).tolist()
    assert len(kept) == len(expected)
    assert sorted(kept.tokens().tolist()) == sorted(expected)


def test_a_limit_keeps_whole_blocks_and_an_index_runs_the_model_for_the_others(
    kept, lm, corpus, tmp_path
):
    directory = tmp_path / "states"
    some = read_states(lm.model, corpus, directory, OPTIONS, limit_bytes=1e5)
    blocks = len(some.ends) - 1
    assert 0 < blocks < len(kept.ends) - 1
    for slot in range(blocks):
        assert torch.equal(some.of_block(slot), kept.of_block(slot))
    assert some.of_block(blocks) is None
    lens = indexed(lm, corpus, tmp_path / "lens", some)
    assert len(lens.cells) == lens.meta.tokens > len(some)
    with pytest.raises(InputError, match="another model, corpus or setting"):
        read_states(lm.model, corpus, directory, replace(OPTIONS, window=48), limit_bytes=1e5)


def test_an_index_from_states_is_the_index_of_the_model(read, kept, lm, corpus, tmp_path):
    lenses = [read, indexed(lm, corpus, tmp_path / "kept", kept)]
    records = [lens.cells.records(np.arange(len(lens.cells))) for lens in lenses]
    # The rounding to bfloat16 moves some positions between neighbouring cells.
    places = [dict(zip(r["position"].tolist(), r["code"], strict=True)) for r in records]
    assert places[0].keys() == places[1].keys()
    off = [np.abs(places[0][n].astype(int) - places[1][n]).max() for n in places[0]]
    assert np.mean(off) < 2
    assert lenses[0].meta.tokens == lenses[1].meta.tokens == len(kept)


def test_parts_with_and_without_kept_states_are_not_of_one_lens(kept, lm, corpus, tmp_path):
    out, source = tmp_path / "lens", (lm.model, lm.head, corpus)
    build_index(*source, out, replace(OPTIONS, shard=Shard(0, 2)), states=kept)
    with pytest.raises(InputError, match="another input"):
        build_index(*source, out, replace(OPTIONS, shard=Shard(1, 2)))
