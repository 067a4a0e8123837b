"""Windows own every token once; packed rows hold every token once, and documents stay apart."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from prismlm.corpus import document_windows, pack, window_batches
from prismlm.corpus.windows import IGNORED, Sequences
from prismlm.errors import InputError
from tests.corpus.test_encode import build
from tests.helpers.small_tokenizers import begun_tokenizer


def _owner(token, length, window, stride):
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
def test_every_token_is_owned_once_by_the_window_of_the_rule(lengths, window, data):
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


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Five documents of 1 to 400 words, each starting with ``<s>``."""
    texts = (" ".join(["word"] * n) for n in (1, 5, 30, 100, 400))
    return build(tmp_path_factory.mktemp("begun"), begun_tokenizer(), *texts)


@pytest.mark.parametrize("name", ["corpus", "begun"])
@pytest.mark.parametrize(("window", "stride", "size"), [(256, 128, 512), (100, 60, 1), (2, 1, 256)])
def test_batches_own_every_token_once(request, name, window, stride, size):
    corpus = request.getfixturevalue(name)
    sizes = corpus.starts, corpus.lengths, window, stride, corpus.prefix
    grid = document_windows(corpus.split("all"), *sizes)
    owned: list[int] = []
    whole = torch.from_numpy(corpus.tokens(0, corpus.num_tokens).astype(np.int64))
    pad, prefix = corpus.eos_token_id, torch.tensor(corpus.prefix, dtype=torch.int64)
    for batch in window_batches(grid, corpus, size):
        rows, width = batch.input_ids.shape
        assert width <= window
        assert width % 64 == 0 or width == window
        assert rows <= max(1, size // width)
        real = batch.positions >= 0
        assert torch.equal(batch.attention_mask, real)
        expected = whole[batch.positions]
        expected[:, : len(prefix)] = prefix
        assert torch.equal(batch.input_ids[real], expected[real])
        assert (batch.input_ids[~real] == pad).all()
        assert not batch.owned[~real].any()
        for row, document in enumerate(batch.document.tolist()):
            places = batch.positions[row][real[row]].tolist()
            assert {corpus.document_at(place) for place in places} == {document}
        owned += batch.positions[batch.owned].tolist()
    assert sorted(owned) == list(range(corpus.num_tokens))


def test_sequences_read_every_token_once(corpus):
    sequences = Sequences(corpus, "all", 12)
    positions = torch.cat([batch.positions[batch.owned] for batch in sequences.batches()])
    assert sorted(positions.tolist()) == list(range(corpus.num_tokens))
    assert len(list(replace(sequences, max_tokens=1).batches())) == 1
    assert replace(sequences, max_tokens=7).tokens == 7
    train, heldout = (replace(sequences, split=split).tokens for split in ("train", "heldout"))
    assert train + heldout == corpus.num_tokens == replace(sequences, max_tokens=10**9).tokens


def check_row(corpus, rows, index):
    """Check all tensors of a row against its pieces."""
    row, ids, labels, positions, prefix = rows[index], [], [], [], corpus.prefix
    for start, size in zip(*(part.tolist() for part in rows.pieces(index)), strict=True):
        tokens = [*prefix, *corpus.tokens(start, size).tolist()[len(prefix) :]]
        first = 1 if start in corpus.starts else 1 + len(prefix)
        ids += tokens
        labels += [IGNORED] * first + tokens[first:]
        positions += range(size)
    left = rows.length - len(ids)
    expected = {
        "input_ids": ids + [corpus.eos_token_id] * left,
        "position_ids": [*positions, *range(left)],
        "labels": labels + [IGNORED] * left,
        "token_mask": [1] * len(ids) + [0] * left,
    }
    masks = {} if rows.shared_rows else {"attention_mask": expected["token_mask"]}
    assert {name: value.tolist() for name, value in row.items()} == expected | masks
    assert row.pop("token_mask").dtype == torch.bool
    assert {value.dtype for value in row.values()} == {torch.int64}


@pytest.mark.parametrize("share_rows", [True, False])
@pytest.mark.parametrize("length", [2, 7, 200])
def test_every_token_is_in_one_row_except_single_remainders(corpus, length, share_rows):
    documents = corpus.split("all")[:9]
    rows = pack(corpus, documents, length, seed=3, share_rows=share_rows)
    starts, covered = list[int](), list[int]()
    for index in range(len(rows)):
        check_row(corpus, rows, index)
        pieces = rows.pieces(index)
        assert pieces[1].sum() <= length
        assert share_rows or len(pieces[0]) == 1
        for start, size in zip(*(part.tolist() for part in pieces), strict=True):
            assert size >= 2
            assert corpus.document_at(start) == corpus.document_at(start + size - 1)
            starts.append(start)
            covered += range(start, start + size)
    assert len(covered) == len(set(covered)) == rows.num_tokens
    ends = (corpus.starts + corpus.lengths)[documents]
    dropped = ends[corpus.lengths[documents] % length == 1] - 1
    assert sorted([*covered, *dropped.tolist()]) == list(range(ends[-1]))
    assert rows.fill == rows.num_tokens / (length * len(rows))
    assert starts != sorted(starts)


def test_pieces_of_rows_start_with_the_prefix(begun):
    rows, predicted = pack(begun, begun.split("all"), 32, seed=0), list[int]()
    for index in range(len(rows)):
        check_row(begun, rows, index)
        for start, size in zip(*(part.tolist() for part in rows.pieces(index)), strict=True):
            predicted += range(start + (1 if start in begun.starts else 2), start + size)
    assert len(predicted) == len(set(predicted))
    # All but the first token of a document, and of each further piece.
    assert len(predicted) > begun.num_tokens - len(begun) - 2 * len(rows) * 2


def test_rows_are_filled():
    lengths = np.random.default_rng(0).integers(2, 600, 400)
    corpus: Any = SimpleNamespace(starts=lengths.cumsum() - lengths, lengths=lengths, prefix=[])
    assert pack(corpus, np.arange(400), 128, seed=0).fill > 0.99


def test_packed_documents_do_not_attend_to_each_other(corpus):
    """Position ids alone make a Hugging Face decoder treat each piece as if it were alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_attention_heads=2, **sizes)).eval()
    rows = pack(corpus, corpus.split("all"), 300, seed=0)
    index = max(range(len(rows)), key=lambda n: len(rows.pieces(n)[0]))
    assert len(rows.pieces(index)[0]) > 2
    ids, positions = (rows[index][name][None] for name in ("input_ids", "position_ids"))
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        at = 0
        for size in rows.pieces(index)[1].tolist():
            alone = model(input_ids=ids[:, at : at + size]).logits[0]
            torch.testing.assert_close(packed[at : at + size], alone, atol=1e-5, rtol=1e-4)
            at += size


def test_sizes_out_of_range_and_empty_splits_are_refused(corpus):
    for window, stride in ((8, 9), (0, 0)):
        with pytest.raises(InputError, match="expected"):
            document_windows(np.array([0]), np.array([0]), np.array([5]), window, stride)
    with pytest.raises(InputError, match="nothing to train on"):
        pack(corpus, np.array([], dtype=np.int64), 8, seed=0)
    with pytest.raises(InputError, match="from 2 on"):
        pack(corpus, corpus.split("all"), 1, seed=0)
