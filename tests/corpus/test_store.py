import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from prismlm.corpus import Corpus, tables
from prismlm.errors import FormatError, InputError
from prismlm.files import read_json, write_json
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


def test_a_path_that_is_not_a_corpus(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match=r"is not a corpus.*prismlm corpus build INPUT"):
            Corpus.open(path)


def test_a_pickle_opens_the_directory_again(corpus):
    corpus.tokens(0, 10)
    data = pickle.dumps(corpus)
    assert len(data) < 1000
    assert pickle.loads(data).fingerprint == corpus.fingerprint


def change(**entries):
    """Return a damage: entries of the description are changed, or all are removed."""

    def damage(copy):
        meta = read_json(copy / "corpus.json") if entries else {}
        write_json(copy / "corpus.json", meta | entries)

    return damage


def flip_token(copy):
    path = copy / "tokens-00000.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def cut_off(copy):
    path = copy / "tokens-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (cut_off, r"tokens-00001\.bin has \d+ bytes, expected"),
        (lambda copy: next(copy.glob("text-00001.*")).unlink(), r"has 0 bytes.* it is missing"),
        (change(version=99), "99"),
        (change(counts={}), "was changed since"),
        (change(), "does not describe"),
        (flip_token, "other tokens for document 'plain'"),
        (
            lambda copy: (copy / "tokenizer" / "tokenizer.json").write_text("{}"),
            r"tokenizer\.json is damaged",
        ),
    ],
)
def test_damaged_directories_are_refused(corpus, damage, error, tmp_path):
    copy = Path(shutil.copytree(corpus.path, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(FormatError, match=error):
        Corpus.open(copy).spans(0)
