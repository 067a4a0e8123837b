from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from prismlm.corpus import Corpus, pack
from prismlm.corpus.packing import IGNORED, best_fit
from prismlm.errors import InputError


@pytest.mark.parametrize("length", [2, 7, 64, 5000])
def test_every_token_is_in_one_row_except_what_is_dropped(corpus: Corpus, length: int) -> None:
    documents = corpus.split("all")
    dataset = pack(corpus, documents, length, seed=0)
    covered: list[int] = []
    for index in range(len(dataset)):
        starts, lengths = dataset.pieces(index)
        assert lengths.sum() <= length
        for start, size in zip(starts.tolist(), lengths.tolist(), strict=True):
            assert size >= 2
            assert corpus.document_at(start) == corpus.document_at(start + size - 1)
            covered += range(start, start + size)
    assert len(covered) == len(set(covered)) == dataset.num_tokens
    left = sorted(set(range(corpus.num_tokens)) - set(covered))
    ends = corpus.starts + corpus.lengths - 1
    assert set(left) == set(ends[corpus.lengths % length == 1].tolist())


def test_rows_say_where_pieces_begin_and_what_to_predict(corpus: Corpus) -> None:
    dataset = pack(corpus, corpus.split("train"), 200, seed=3)
    eos = corpus.eos_token_id
    assert any(len(dataset.pieces(n)[0]) > 2 for n in range(len(dataset)))
    for index in range(len(dataset)):
        row = dataset[index]
        assert {name: value.dtype for name, value in row.items()} == {
            "input_ids": torch.int64,
            "position_ids": torch.int64,
            "labels": torch.int64,
            "token_mask": torch.bool,
        }
        at = 0
        for start, size in zip(*dataset.pieces(index), strict=True):
            expected = torch.from_numpy(corpus.tokens(int(start), int(size)).astype(np.int64))
            here = slice(at, at + int(size))
            assert torch.equal(row["input_ids"][here], expected)
            assert torch.equal(row["position_ids"][here], torch.arange(int(size)))
            assert row["labels"][at] == IGNORED
            assert torch.equal(row["labels"][here][1:], expected[1:])
            assert row["token_mask"][here].all()
            at += int(size)
        assert not row["token_mask"][at:].any()
        assert (row["input_ids"][at:] == eos).all()
        assert (row["labels"][at:] == IGNORED).all()
        assert torch.equal(row["position_ids"][at:], torch.arange(200 - at))
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_rows_are_filled(build: Callable[..., Corpus]) -> None:
    generator = np.random.default_rng(0)
    corpus = build(["ab " * int(n) for n in generator.integers(1, 300, 400)])
    dataset = pack(corpus, corpus.split("all"), 128, seed=0)
    assert dataset.fill > 0.99
    filled = sum(int(dataset[n]["token_mask"].sum()) for n in range(len(dataset)))
    assert dataset.fill == filled / (128 * len(dataset))


def test_padded_rows_hold_one_piece_each_and_the_same_tokens(corpus: Corpus) -> None:
    documents = corpus.split("all")
    packed = pack(corpus, documents, 200, seed=3)
    padded = pack(corpus, documents, 200, seed=3, share_rows=False)
    assert "attention_mask" not in packed[0]
    assert padded.num_tokens == packed.num_tokens
    lengths = corpus.lengths[documents]
    assert len(padded) == sum(n // 200 + (n % 200 > 1) for n in lengths.tolist()) > len(packed)
    assert padded.fill == padded.num_tokens / (200 * len(padded))
    starts: list[int] = []
    for index in range(len(padded)):
        row = padded[index]
        (start,), (size,) = padded.pieces(index)
        starts.append(int(start))
        assert row["attention_mask"].tolist() == [1] * size + [0] * (200 - size)
        assert row["attention_mask"].dtype == torch.int64
        assert torch.equal(row["token_mask"], row["attention_mask"].bool())
        assert (row["labels"][size:] == IGNORED).all()
        assert (row["labels"] != IGNORED).sum() == size - 1
    assert starts != sorted(starts)
    every = np.concatenate([packed.pieces(n)[0] for n in range(len(packed))])
    assert sorted(starts) == sorted(every.tolist())


@given(st.lists(st.integers(1, 12), max_size=60))
def test_best_fit_never_overfills_nor_opens_a_bin_without_need(sizes: list[int]) -> None:
    filled: dict[int, int] = {}
    for size, chosen in zip(sizes, best_fit(sizes, 12).tolist(), strict=True):
        spaces = [12 - n for n in filled.values() if 12 - n >= size]
        if chosen in filled:
            assert 12 - filled[chosen] == min(spaces)
        else:
            assert not spaces
            assert chosen == len(filled)
        filled[chosen] = filled.get(chosen, 0) + size


def test_packed_documents_do_not_see_each_other(corpus: Corpus) -> None:
    """The position ids alone make a Hugging Face decoder treat each piece as if it were alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    dataset = pack(corpus, corpus.split("all"), 300, seed=0)
    index = max(range(len(dataset)), key=lambda n: len(dataset.pieces(n)[0]))
    assert len(dataset.pieces(index)[0]) > 2
    row = dataset[index]
    with torch.no_grad():
        packed = model(
            input_ids=row["input_ids"][None],
            position_ids=row["position_ids"][None],
            use_cache=False,
        ).logits[0]
        at = 0
        for size in dataset.pieces(index)[1].tolist():
            alone = model(input_ids=row["input_ids"][None, at : at + size]).logits[0]
            torch.testing.assert_close(packed[at : at + size], alone, atol=1e-5, rtol=1e-4)
            at += size


def test_nothing_to_train_on(corpus: Corpus) -> None:
    with pytest.raises(InputError, match="nothing to train on"):
        pack(corpus, np.array([], dtype=np.int64), 8, seed=0)
    with pytest.raises(InputError, match="at least 2"):
        pack(corpus, corpus.split("all"), 1, seed=0)
