"""Training rows: which tokens they hold, what is to be predicted, and that documents are apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prismlm.corpus import Corpus, PackedDataset, pack
from prismlm.corpus.windows import IGNORED
from prismlm.errors import InputError


def check_row(corpus: Corpus, rows: PackedDataset, index: int) -> None:
    """Check all tensors of a row against its pieces."""
    row, at = rows[index], 0
    dtypes = {name: value.dtype for name, value in row.items()}
    assert dtypes.pop("token_mask") == torch.bool
    assert set(dtypes.values()) == {torch.int64}
    for start, size in zip(*(part.tolist() for part in rows.pieces(index)), strict=True):
        expected = torch.from_numpy(corpus.tokens(start, size).astype(np.int64))
        piece = slice(at, at + size)
        assert torch.equal(row["input_ids"][piece], expected)
        assert torch.equal(row["position_ids"][piece], torch.arange(size))
        assert row["labels"][at] == IGNORED
        assert torch.equal(row["labels"][piece][1:], expected[1:])
        assert row["token_mask"][piece].all()
        at += size
    assert not row["token_mask"][at:].any()
    assert (row["input_ids"][at:] == corpus.eos_token_id).all()
    assert (row["labels"][at:] == IGNORED).all()
    assert torch.equal(row["position_ids"][at:], torch.arange(rows.length - at))
    if not rows.shared_rows:
        assert torch.equal(row["attention_mask"], row["token_mask"].long())


@pytest.mark.parametrize("share_rows", [True, False])
@pytest.mark.parametrize("length", [2, 7, 200, 5000])
def test_every_token_is_in_one_row_except_single_remainders(
    corpus: Corpus, length: int, share_rows: bool
) -> None:
    rows = pack(corpus, corpus.split("all"), length, seed=3, share_rows=share_rows)
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
    ends = corpus.starts + corpus.lengths - 1
    dropped = ends[corpus.lengths % length == 1].tolist()
    assert sorted([*covered, *dropped]) == list(range(corpus.num_tokens))
    assert rows.fill == rows.num_tokens / (length * len(rows))
    assert starts != sorted(starts)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_rows_are_filled(build: Callable[..., Corpus]) -> None:
    generator = np.random.default_rng(0)
    corpus = build(["ab " * int(n) for n in generator.integers(1, 300, 400)])
    assert pack(corpus, corpus.split("all"), 128, seed=0).fill > 0.99


def test_packed_documents_do_not_attend_to_each_other(corpus: Corpus) -> None:
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


def test_empty_splits_and_short_rows_are_refused(corpus: Corpus) -> None:
    with pytest.raises(InputError, match="nothing to train on"):
        pack(corpus, np.array([], dtype=np.int64), 8, seed=0)
    with pytest.raises(InputError, match="at least 2"):
        pack(corpus, corpus.split("all"), 1, seed=0)
