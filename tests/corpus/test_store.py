import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from prismlm.corpus import Corpus, tables
from prismlm.errors import FormatError, InputError
from tests.helpers.records import RECORDS


def test_metadata_by_document(corpus):
    assert corpus.name == "built"
    assert corpus.doc_ids == [record["id"] for record in RECORDS]
    assert corpus.column("license") == [record.get("license") for record in RECORDS]
    assert corpus.column("source") == [record.get("source", "texts") for record in RECORDS]
    assert corpus.column("url")[3] == "x:y"
    assert corpus.find("marker") == 2
    with pytest.raises(InputError, match="'absent'"):
        corpus.find("absent")
    with pytest.raises(InputError, match="Did you mean 'license'"):
        corpus.column("licence")
    with pytest.raises(InputError, match="the split is"):
        corpus.split("test")


def test_tokens_across_shards(corpus):
    whole = corpus.tokens(0, corpus.num_tokens)
    assert len(whole) == corpus.num_tokens
    assert whole.dtype == np.uint16
    ends = np.cumsum([shard["tokens"] for shard in corpus.meta["shards"]])
    for end in ends[:-1].tolist():
        assert np.array_equal(corpus.tokens(end - 3, 7), whole[end - 3 : end + 4])
        assert np.array_equal(corpus.tokens(end, 2), whole[end : end + 2])
    assert (
        np.flatnonzero(whole == corpus.eos_token_id).tolist()
        == (corpus.starts + corpus.lengths - 1).tolist()
    )
    assert np.array_equal(np.concatenate([*corpus.parts()]), whole)
    assert len(corpus.tokens(corpus.num_tokens, 0)) == 0
    for start in (corpus.num_tokens - 1, -1):
        with pytest.raises(InputError, match="outside"):
            corpus.tokens(start, 2)
    expected = np.repeat(np.arange(len(corpus)), corpus.lengths)
    assert [corpus.document_at(p) for p in range(corpus.num_tokens)] == expected.tolist()


def test_several_threads_read_the_same_corpus(corpus, monkeypatch):
    monkeypatch.setattr(tables, "CACHED_ROW_GROUPS", 1)
    opened = Corpus.open(corpus.path)
    drawn = np.random.default_rng(0).integers(len(corpus), size=800).tolist()
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(opened.text, drawn))
    assert read == [RECORDS[number]["text"] for number in drawn]


def test_spans_recover_the_text_of_every_token(corpus):
    for index, spans in enumerate(map(corpus.spans, corpus.split("all"))):
        text = corpus.text(index)
        assert spans.shape == (corpus.lengths[index], 2)
        assert spans[-1].tolist() == [len(text), len(text)]
        assert spans[0, 0] == 0
        assert spans[-2, 1] == len(text)
        tokens = corpus.tokens(int(corpus.starts[index]), int(corpus.lengths[index]))
        for token, (start, end) in zip(tokens[:-1].tolist(), spans[:-1].tolist(), strict=True):
            decoded = corpus.tokenizer.decode([token])
            assert decoded == text[start:end] or "�" in decoded


def test_a_corpus_is_opened_by_its_path_or_a_pickle_of_it(corpus, tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match=r"is not a corpus.*prismlm corpus build INPUT"):
            Corpus.open(path)
    corpus.tokens(0, 10)
    data = pickle.dumps(corpus)
    assert len(data) < 1000
    assert pickle.loads(data).fingerprint == corpus.fingerprint


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("tokens-00001.bin", lambda data: data[:-2], r"tokens-00001\.bin has \d+ bytes, expected"),
        ("text-00001.parquet", lambda data: None, r"has 0 bytes.* it is missing"),
        ("corpus.json", lambda data: data.replace(b'"version": 2', b'"version": 99'), "99"),
        ("corpus.json", lambda data: data.replace(b'"documents"', b'"files"'), "was changed since"),
        ("corpus.json", lambda data: b"{}", "does not describe"),
        ("tokens-00000.bin", lambda data: b"\1" + data[1:], "other tokens for document 'plain'"),
        ("tokenizer/tokenizer.json", lambda data: b"{}", r"tokenizer\.json is damaged"),
    ],
)
def test_damaged_directories_are_refused(corpus, name, change, error, tmp_path):
    copy = Path(shutil.copytree(corpus.path, tmp_path / "copy"))
    changed = change((copy / name).read_bytes())
    (copy / name).unlink() if changed is None else (copy / name).write_bytes(changed)
    with pytest.raises(FormatError, match=error):
        Corpus.open(copy).spans(0)
