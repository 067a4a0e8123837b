"""Building a corpus directory: its format, its split, what it replaces, and what it would cost."""

import hashlib
import shutil
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.corpus import Columns, Corpus, HubDataset, build_corpus, estimate_build
from prismlm.corpus import part as module
from prismlm.corpus.windows import BlockOrder
from prismlm.errors import InputError
from prismlm.run_state import writing
from tests.helpers.records import RECORDS, write_jsonl

OPTIONS: dict[str, Any] = {"vocab_size": 300, "parts": 6, "heldout_fraction": 0.3}


def contents(directory):
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def rebuild(directory, records, **options):
    path = write_jsonl(directory / "texts.jsonl", records)
    return build_corpus(path, directory / "built", overwrite=True, **OPTIONS | options)


def test_the_directory_follows_the_format(corpus):
    assert len(corpus.meta["shards"]) > 2
    position, ids = 0, list[str]()
    for shard in range(len(corpus.meta["shards"])):
        documents = pq.read_table(corpus.path / f"documents-{shard:05d}.parquet").to_pylist()
        texts = pq.read_table(corpus.path / f"text-{shard:05d}.parquet").to_pylist()
        tokens = np.fromfile(corpus.path / f"tokens-{shard:05d}.bin", dtype="<u2")
        first = position
        for row, text in zip(documents, texts, strict=True):
            assert (row["start"], row["doc_id"]) == (position, text["doc_id"])
            *words, last = tokens[position - first :][: row["length"]]
            assert last == corpus.eos_token_id
            assert corpus.eos_token_id not in words
            assert corpus.tokenizer.decode(words) == text["text"]
            position += row["length"]
            ids.append(row["doc_id"])
        assert position - first == len(tokens)
    assert ids == [record["id"] for record in RECORDS]
    characters = sum(len(record["text"]) for record in RECORDS)
    counts = {"documents": len(RECORDS), "tokens": position, "characters": characters}
    assert corpus.meta["counts"] == counts | {"skipped": 0}


def test_the_split_follows_the_rule_in_the_metadata(corpus, tmp_path):
    digests = (hashlib.sha256(record["id"].encode()).digest() for record in RECORDS)
    keys = [int.from_bytes(digest[:8], "little") / 2**64 for digest in digests]
    held_out = [n for n, key in enumerate(keys) if key < 0.3]
    assert 0 < len(held_out) < len(RECORDS)
    assert corpus.split("heldout").tolist() == held_out
    both = [*corpus.split("train").tolist(), *held_out]
    assert sorted(both) == corpus.split("all").tolist() == list(range(len(RECORDS)))
    tokens = corpus.lengths[held_out].sum()
    assert corpus.meta["heldout"] == {"documents": len(held_out), "tokens": tokens}
    # A fraction that is too small holds one document out.
    small = rebuild(tmp_path, RECORDS, heldout_fraction=1e-9)
    first = int(np.argmin(keys))
    assert small.split("heldout").tolist() == [first]
    assert small.meta["heldout"] == {"documents": 1, "tokens": small.lengths[first]}


@pytest.mark.parametrize("count", [1, 5])
def test_one_of_two_or_more_documents_is_held_out(count, tiny_corpus, tmp_path):
    records = [{"id": f"{number}.txt", "text": "The sea was calm. " * 9} for number in range(count)]
    # Some parts are empty.
    options = {"parts": 3, "tokenizer": tiny_corpus / "tokenizer"}
    built = rebuild(tmp_path, records, heldout_fraction=0.05, **options)
    assert len(built.split("heldout")) == built.meta["heldout"]["documents"] == (count > 1)
    assert built.meta["heldout"]["tokens"] == built.lengths[built.split("heldout")].sum()
    assert len(rebuild(tmp_path, records, heldout_fraction=0, **options).split("heldout")) == 0
    stated = [{"text": "a", "split": "train"}] * count
    assert len(rebuild(tmp_path, stated, **options).split("heldout")) == 0


STATED = (" Train", "training", "test", "validation", "", "held-out", "eval", "dev")


def stated_records(**others):
    splits = dict(enumerate(STATED)) | {int(name[1:]): split for name, split in others.items()}
    return [
        record | ({"split": splits[n]} if n in splits else {}) for n, record in enumerate(RECORDS)
    ]


def test_a_split_column_overrides_the_rule(corpus, tmp_path):
    options = {"tokenizer": corpus.path / "tokenizer", "parts": 2}
    stated = rebuild(tmp_path, stated_records(), **options)
    by_id = corpus.split("heldout").tolist()
    expected = sorted({2, 3, 5, 6, 7} | {n for n in by_id if n not in {0, 1}})
    assert stated.split("heldout").tolist() == expected != by_id
    tokens = stated.lengths[expected].sum()
    assert stated.meta["heldout"] == {"documents": len(expected), "tokens": tokens}
    assert stated.meta["split"]["stated"] == {"train": 2, "heldout": 5}
    assert stated.fingerprint != corpus.fingerprint
    # Block by block, as an index reads it.
    order = BlockOrder.for_tokens(stated.num_tokens)
    grids = [order.windows(slot, stated, "heldout", 64, 48) for slot in range(order.count)]
    read = {int(number) for grid in grids for number in grid.document}
    assert read == {n for n in expected if stated.lengths[n] > 1}
    unknown = stated_records(n9="tets")
    with pytest.raises(InputError, match=r"'long-4' has the split 'tets': .*--split-column ''"):
        rebuild(tmp_path, unknown, **options)
    ignored = rebuild(tmp_path, unknown, columns=Columns(split=""), **options)
    assert ignored.fingerprint == corpus.fingerprint


def test_equal_inputs_give_equal_bytes_and_fingerprints(corpus, tmp_path):
    assert contents(rebuild(tmp_path, RECORDS).path) == contents(corpus.path)
    changed = [*RECORDS[:-1], {**RECORDS[-1], "license": "other"}]
    options = {"tokenizer": corpus.path / "tokenizer"}
    assert rebuild(tmp_path, changed, **options).fingerprint != corpus.fingerprint


def test_a_corpus_is_built_from_a_store_as_from_a_directory(tiny_corpus, tmp_path):
    upath = pytest.importorskip("upath")
    remote = upath.UPath(f"memory://{tmp_path.name}")
    (tmp_path / "texts").mkdir()
    remote.mkdir()
    for root in (tmp_path / "texts", remote):
        (root / "a.txt").write_text("A text of its own. " * 30)
        (root / "b.jsonl").write_text("".join(f'{{"text": "Row {n}."}}\n' for n in range(90)))
    options: dict[str, Any] = {"tokenizer": tiny_corpus / "tokenizer", "parts": 3}
    expected = build_corpus(tmp_path / "texts", tmp_path / "local", **options)
    built = build_corpus([str(remote / "a.txt"), remote], tmp_path / "built", **options)
    assert built.fingerprint == expected.fingerprint


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path):
    words = {f"w{n}": n for n in range(70_000)} | {"</s>": 70_000, "<unk>": 70_001}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path / "t")
    records = [{"text": "w69999 w3 </s> zebra"}]
    corpus = rebuild(tmp_path, records, tokenizer=tmp_path / "t", parts=1)
    tokens = corpus.tokens(0, 5)
    assert tokens.dtype == np.uint32
    assert tokens[[0, 1, 3, 4]].tolist() == [69_999, 3, 70_001, 70_000]
    assert corpus.text(0)[: corpus.spans(0)[1, 1]] == "w69999 w3"


def test_an_existing_corpus_is_replaced_only_on_request(corpus, tmp_path):
    corpus = Corpus.open(shutil.copytree(corpus.path, tmp_path / "built"))
    before = contents(corpus.path)
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": "second"}])
    (tmp_path / "broken.jsonl").write_text("{", encoding="utf-8")
    (tmp_path / "notes").mkdir()
    options = {"vocab_size": 300, "overwrite": True}
    with pytest.raises(InputError, match="--overwrite"):
        build_corpus(source, corpus.path, vocab_size=300)
    with pytest.raises(InputError, match="not valid JSON"):
        build_corpus(tmp_path / "broken.jsonl", corpus.path, **options)
    with pytest.raises(InputError, match=r"lies in .* which the corpus would replace"):
        build_corpus(next(corpus.path.glob("text-*.parquet")), corpus.path, **options)
    with writing(corpus.path), pytest.raises(InputError, match="written to by another process"):
        build_corpus(source, corpus.path, **options)
    assert contents(corpus.path) == before
    assert build_corpus(source, corpus.path, **options).text(0) == "second"
    with pytest.raises(InputError, match="if it is a corpus"):
        build_corpus(source, tmp_path / "notes", overwrite=True)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("make", [build_corpus, estimate_build])
@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ('{"text": "a"}', {"vocab_size": 12}, "257"),
        ('{"text": "a"}', {"heldout_fraction": float("nan")}, "below 1"),
        ('{"text": 3}', {"vocab_size": 300}, r"t\.jsonl:2: the text is 3"),
    ],
)
def test_what_a_build_and_its_dry_run_refuse(make, row, options, message, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"text": "a"}}\n{row}\n')
    with pytest.raises(InputError, match=message):
        make(path, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_estimated_tokens_are_those_of_the_corpus(tiny_corpus, tmp_path, monkeypatch):
    """Exactly where all of it is tokenised, and nearly where its beginning is."""
    options = {"tokenizer": tiny_corpus / "tokenizer"}
    rows = [{"text": f"{n} " + "a line of text " * (n % 4 + 1)} for n in range(9000)]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    built = build_corpus(path, tmp_path / "built", **options)
    exact = estimate_build(path, tmp_path / "out", **options)
    assert (exact.figures["documents"], exact.figures["tokens"]) == (9000, built.num_tokens)
    size = sum(file.stat().st_size for file in built.path.glob("*-0*"))
    assert exact.disk_bytes == pytest.approx(size, rel=0.05)
    monkeypatch.setattr(module, "MEASURED_SECONDS", 0.0)
    cost = estimate_build(path, tmp_path / "out", **options)
    assert cost.unknown == ("Whether the rest is like the first 4,096 documents.",)
    assert not exact.unknown
    assert cost.figures["documents"] == pytest.approx(9000, rel=0.1)
    assert cost.figures["tokens"] == pytest.approx(built.num_tokens, rel=0.1)
    assert estimate_build(path, tmp_path / "out", vocab_size=300).seconds > cost.seconds > 0
    streamed = estimate_build(
        HubDataset("json", data_files=(str(path),)), tmp_path / "out", **options
    )
    assert (streamed.seconds, streamed.figures["tokens"], streamed.disk_bytes) == (None, None, None)
    assert "does not say before it is read" in streamed.unknown[1]
    assert not (tmp_path / "out").exists()
