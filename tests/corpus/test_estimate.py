"""What a build would cost: which pieces are measured, and how they are scaled."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Document, build_corpus, estimate_build
from prismlm.corpus.build import TRAINING_CHARACTERS
from prismlm.corpus.estimate import Sample, cost_of, training_scale
from tests.helpers.records import write_jsonl

DOCUMENTS = [Document(str(n), f"{n} the model reads a line " * 40) for n in range(30)]


def test_reading_counts_once_for_each_pass_and_for_all_text(tiny_corpus):
    """Reading a piece is said to take 1,000 s, beside which nothing else does."""
    sample = Sample(DOCUMENTS, 1000.0, 10.0)
    given = cost_of(sample, tiny_corpus / "tokenizer")
    assert given.seconds == pytest.approx(10 * 1000, rel=0.01)
    assert given.documents == 300
    trained = cost_of(sample, None, 300)
    assert trained.seconds == pytest.approx(2 * 10 * 1000, rel=0.01)
    unknown = cost_of(Sample(DOCUMENTS, 1000.0, None, ("How much.",)), None, 300)
    assert (unknown.seconds, unknown.tokens, unknown.disk_bytes) == (None, None, None)
    assert unknown.sampled_documents == 30


def test_loading_a_tokenizer_counts_once(tiny_corpus, monkeypatch):
    """However slow it is to load, and however much text there is."""
    import time

    from prismlm.corpus import estimate

    real = estimate.load_tokenizer

    def slow(path):
        time.sleep(0.5)
        return real(path)

    monkeypatch.setattr(estimate, "load_tokenizer", slow)
    some, more = (
        cost_of(Sample(DOCUMENTS[:1], 0.0, scale), tiny_corpus / "tokenizer").seconds
        for scale in (1.0, 3.0)
    )
    assert some > 0.5
    assert more - some < 0.5


def test_a_tokenizer_is_trained_on_no_more_than_its_limit():
    assert training_scale(1.0, 1000) == 1
    assert training_scale(16.0, 1000) == pytest.approx(16**0.9)
    half = TRAINING_CHARACTERS // 2
    assert training_scale(100.0, half) == pytest.approx(2**0.9)
    assert training_scale(100.0, 3 * TRAINING_CHARACTERS) == 1


def test_disk_and_tokens_are_those_of_a_corpus_of_the_piece(tmp_path):
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": d.text} for d in DOCUMENTS])
    expected = estimate_build(source, tmp_path / "out", vocab_size=300)
    corpus = build_corpus(source, tmp_path / "out", vocab_size=300)
    assert expected.tokens == corpus.num_tokens
    written = sum(path.stat().st_size for path in corpus.path.glob("*-0*"))
    assert expected.disk_bytes == pytest.approx(written, rel=0.05)


def test_the_first_rows_of_parquet_may_be_longer_than_the_others(tmp_path, monkeypatch):
    """Ten long texts before a thousand short ones: 4 % of the rows have half of the text."""
    from prismlm.corpus import estimate

    rng = random.Random(0)
    words = [str(rng.random()) for _ in range(2000)]
    texts = [" ".join(rng.choices(words, k=5000)) for _ in range(10)]
    texts += [" ".join(rng.choices(words, k=50)) for _ in range(1000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "t.parquet")
    monkeypatch.setattr(estimate, "PIECE_CHARACTERS", sum(map(len, texts[:5])))
    found = estimate_build(tmp_path / "t.parquet", tmp_path / "out", vocab_size=300)
    assert found.sampled_documents == 5
    assert found.text_bytes == pytest.approx(sum(map(len, texts)), rel=0.1)


def test_of_many_small_files_as_many_are_opened_as_hold_the_piece(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"{number} a line of text")
    found = estimate_build(texts, tmp_path / "out", vocab_size=300)
    assert found.sampled_documents == found.documents == 40
