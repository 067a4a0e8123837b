from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.corpus import Corpus, document_windows, window_batches
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError


def _owner(token: int, length: int, window: int, stride: int) -> tuple[int, int]:
    """Return the window (its offset and length) that gives a token its state, by the rule itself.

    It is the earliest that gives the token window − stride tokens of context, or the first.
    """
    for start in range(0, length, stride):
        end = min(length, start + window)
        context = token - start
        if start <= token < end and (start == 0 or context >= window - stride):
            return start, end - start
    raise AssertionError("no window holds the token")


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    window=st.integers(1, 20),
    data=st.data(),
)
def test_every_token_is_owned_once_by_the_window_of_the_rule(
    lengths: list[int], window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window))
    chosen = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(0, 6))]
    starts = np.cumsum([0, *lengths[:-1]])
    grid = document_windows(np.array(chosen, int), starts, np.array(lengths), window, stride)
    owned: list[tuple[int, int, int, int]] = []
    for n in range(len(grid)):
        document, start = int(grid.document[n]), int(grid.start[n] - starts[grid.document[n]])
        tokens = range(start + int(grid.skip[n]), start + int(grid.length[n]))
        assert len(tokens) > 0, "no window owns nothing"
        owned += [(document, token, start, int(grid.length[n])) for token in tokens]
    expected = [
        (document, token, *_owner(token, lengths[document], window, stride))
        for document in chosen
        for token in range(lengths[document])
    ]
    assert owned == expected


@pytest.mark.parametrize(("window", "stride"), [(8, 0), (8, 9), (0, 0), (8, -1)])
def test_strides_out_of_range(window: int, stride: int) -> None:
    with pytest.raises(InputError, match="expected"):
        document_windows(np.array([0]), np.array([0]), np.array([5]), window, stride)


@pytest.mark.parametrize(
    ("window", "stride", "size"), [(256, 128, 512), (100, 60, 1), (64, 64, 640)]
)
def test_batches_own_every_token_once(corpus: Corpus, window: int, stride: int, size: int) -> None:
    documents = corpus.split("all")
    grid = document_windows(documents, corpus.starts, corpus.lengths, window, stride)
    owned: list[int] = []
    whole = torch.from_numpy(corpus.tokens(0, corpus.num_tokens).astype(np.int64))
    pad = corpus.eos_token_id
    for batch in window_batches(grid, corpus, size, pad):
        rows, width = batch.input_ids.shape
        assert width <= window
        assert width % 64 == 0 or width == window
        assert rows <= max(1, size // width)
        real = batch.positions >= 0
        assert torch.equal(batch.attention_mask, real)
        assert torch.equal(batch.input_ids[real], whole[batch.positions[real]])
        assert (batch.input_ids[~real] == pad).all()
        assert not batch.owned[~real].any()
        for row, document in enumerate(batch.document.tolist()):
            places = batch.positions[row][real[row]].tolist()
            assert {corpus.document_at(place) for place in places} == {document}
        owned += batch.positions[batch.owned].tolist()
    assert sorted(owned) == list(range(corpus.num_tokens))
    with pytest.raises(InputError, match="from 1 on"):
        next(window_batches(grid, corpus, 0, pad))


def test_sequences_read_every_token_once(corpus: Corpus) -> None:
    sequences = Sequences(corpus, "all", 12)
    positions = torch.cat([batch.positions[batch.owned] for batch in sequences.batches()])
    assert sorted(positions.tolist()) == list(range(corpus.num_tokens))
    assert len(list(replace(sequences, max_tokens=1).batches())) == 1
    assert replace(sequences, max_tokens=7).tokens == 7
    train, heldout = (replace(sequences, split=split).tokens for split in ("train", "heldout"))
    assert train + heldout == corpus.num_tokens == replace(sequences, max_tokens=10**9).tokens
