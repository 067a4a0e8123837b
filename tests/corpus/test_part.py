"""A corpus made in parts: its format and split, equal however it is divided, resumed, filtered."""

import hashlib
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.corpus import (
    Columns,
    Corpus,
    Filters,
    HubDataset,
    build_corpus,
    formats,
)
from prismlm.corpus import part as module
from prismlm.corpus.part import CorpusPart
from prismlm.corpus.windows import BlockOrder
from prismlm.errors import InputError, Interrupted
from prismlm.run_state import writing
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.records import RECORDS, write_jsonl

WORDS = "the sea and the land that have been with us to be of use in every year".split()  # noqa: SIM905
GOOD = " ".join(WORDS * 5)


@pytest.fixture
def tokenizer(tiny_corpus):
    return tiny_corpus / "tokenizer"


@pytest.fixture
def texts(tmp_path):
    """Files that parts share, and files that belong to one part."""
    directory = tmp_path / "texts"
    directory.mkdir()
    for number in range(3):
        (directory / f"{number}.txt").write_text(f"Text {number} of three. " * 9)
    (directory / "4.txt").write_text("")
    lines = [f'{{"text": "Row {number} of many é."}}' for number in range(200)]
    (directory / "rows.jsonl").write_text("\ufeff" + "\r\n\n".join(lines))
    with pa.CompressedOutputStream(str(directory / "z.jsonl.gz"), "gzip") as file:
        file.write("\n".join(lines[:50]).encode())
    table = pa.table({"text": [f"Cell {n} of a table." for n in range(200)]})
    pq.write_table(table, directory / "table.parquet", row_group_size=9)
    (directory / "zz.txt").write_text("")
    return directory


@pytest.fixture
def build(build, texts):
    """Build a corpus from these files, or from rows, in four parts."""
    return partial(build, inputs=texts, parts=4)


def contents(directory):
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def written(corpus):
    """Return all that a corpus says of its documents."""
    columns = [corpus.column(name) for name in ("doc_id", "source", "license")]
    facts = {name: corpus.meta.get(name) for name in ("counts", "left_out", "heldout", "read")}
    texts = [corpus.text(number) for number in range(len(corpus))]
    splits = corpus.split("heldout").tolist(), corpus.starts.tolist()
    return corpus.fingerprint, columns, facts, texts, splits, corpus.tokens(0, 99).tolist()


@pytest.mark.parametrize(("counted", "parts"), [(2**30, 40), (0, 7)])
def test_a_corpus_is_the_same_in_any_number_of_parts(
    build, texts, store, counted, parts, monkeypatch
):
    monkeypatch.setattr(formats, "MAX_COUNTED", counted)
    whole = build("whole", parts=1)
    assert len(whole) == 453
    rows = [name for name in whole.doc_ids if name.startswith("rows.jsonl:")]
    assert rows[:2] == (["rows.jsonl:1", "rows.jsonl:3"] if counted else ["rows.jsonl:@0", rows[1]])
    assert written(build("parts", parts=parts)) == written(whole)
    remote = store(texts)
    assert written(build("store", inputs=[str(remote / "0.txt"), remote])) == written(whole)
    trained = [build(f"t{n}", parts=n, tokenizer=None, vocab_size=290) for n in (1, 5)]
    assert written(trained[0]) == written(trained[1])


def test_a_tokenizer_is_trained_on_texts_from_all_over_the_input(tmp_path, monkeypatch):
    rows = [{"text": f"Row {number} of many é."} for number in range(600)]
    part = CorpusPart(tmp_path / "out", None, write_jsonl(tmp_path / "rows.jsonl", rows))
    assert part.training_texts() == [row["text"] for row in rows]
    monkeypatch.setattr(module, "PLACE_BYTES", 1000)
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", 3000)
    texts = part.training_texts()
    assert sum(map(len, texts)) == 3000
    numbers = [int(text.split()[1]) for text in texts if "many" in text]
    assert numbers == sorted(numbers)
    assert {number // 40 for number in numbers} == set(range(15))


@pytest.mark.slow
def test_workers_of_every_engine_write_the_same_files(engine, build):
    pytest.importorskip("datatrove")
    # Ray takes long to start the workers of each step.
    options = {"tokenizer": None, "vocab_size": 290, "filters": Filters(near_duplicates=True)}
    options = {} if engine == "ray" else options
    expected = build("one", **options)
    workers = build("workers", engine=engine, workers=2, **options)
    assert contents(workers.path) == contents(expected.path)
    assert not list(expected.path.parent.glob(".*"))


def test_finished_parts_are_kept_and_those_of_other_input_refused(build, texts, tmp_path):
    whole = build("whole")
    with pytest.raises(Interrupted, match=r"kept in .*\.out\.partial"):
        build(progress=InterruptAfter(3))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob(".out.partial/part-*")}
    assert len(kept) == 2
    rows = texts / "rows.jsonl"
    before, times = rows.read_bytes(), rows.stat()
    # Size and ids are unchanged.
    rows.write_bytes(before.replace(b"Row 5 of", b"Row 6 of"))
    changed = r"another input \(files: 8 files, .* → 8 files, .*--overwrite"
    with pytest.raises(InputError, match=changed):
        build()
    rows.write_bytes(before)
    os.utime(rows, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(InputError, match=r"heldout_fraction: 0\.05 → 0\.5"):
        build(heldout_fraction=0.5)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert contents(build().path) == contents(whole.path)
    with pytest.raises(Interrupted):
        build(overwrite=True, progress=InterruptAfter(3))
    assert build(overwrite=True, heldout_fraction=0.5).split("heldout").size > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts", "whole"]


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_changes_during_the_build_is_named(remote, store, texts, tokenizer, tmp_path):
    texts = store(texts) if remote else texts
    part = CorpusPart(tmp_path / "out", tokenizer, [texts])
    part(None, 0, 3)
    listed = part.list_inputs(3)
    table = texts / "table.parquet"
    table.write_bytes(table.read_bytes() + b" ")
    with pytest.raises(InputError, match=r"table\.parquet has changed since it was listed"):
        listed.make(None, 2, 3)
    table.unlink()
    with pytest.raises(InputError, match=r"table\.parquet cannot be read"):
        listed.make(None, 2, 3)


def test_parts_by_themselves_and_the_last_one_writes_the_corpus(build, texts, tokenizer, tmp_path):
    part = CorpusPart(tmp_path / "out", tokenizer, texts, vocab_size=290)
    for named in (None, tokenizer):  # the first part trains one
        expected = build("whole", parts=3, tokenizer=named, vocab_size=290, overwrite=True)
        shutil.rmtree(part.out, ignore_errors=True)
        for number in (2, 0, 1):
            assert not part.out.exists()
            replace(part, tokenizer=named)(None, number, 3)
        assert contents(part.out) == contents(expected.path)
    for other, message in (
        (replace(part, tokenizer=None, inputs=None), "name a tokenizer"),
        (replace(part, filters=Filters(near_duplicates=True)), "MinHash before it"),
        (part, "--overwrite"),
    ):
        with pytest.raises(InputError, match=message):
            other([], 0, 2)


def test_an_id_of_the_steps_before_is_named(tokenizer, tmp_path):
    pytest.importorskip("datatrove")
    from datatrove.data import Document

    part = CorpusPart(tmp_path / "out", tokenizer)
    part([Document(GOOD, "a"), Document(GOOD, "b")], 0, 2)
    with pytest.raises(InputError, match="part 2 of 2: another document has the id 'a' too"):
        part([Document(GOOD, "a"), Document(GOOD, "c")], 1, 2)


def test_what_cannot_be_started_leaves_no_files(build, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train_tokenizer", lambda *_: pytest.fail("trained first"))
    for options, message in (
        ({"workers": 5, "tokenizer": None}, "5 workers for 4 part"),
        ({"filters": Filters(languages=("en", "xq"))}, "unknown language xq"),
    ):
        with pytest.raises(InputError, match=message):
            build(**options)
    (texts / "2.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"2\.txt is not UTF-8"):
        build(parts=1)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def near_duplicates():
    """Return 60 texts in threes: a text, the same with another last word, and others."""
    rows = []
    for n in range(60):
        words = [
            WORDS[(n // 3 * 7 + k * k) % len(WORDS)] + "xyz"[n // 3 % 3] * (n // 9)
            for k in range(60)
        ]
        rows.append({"id": f"d{n}", "text": " ".join([*words, "end" if n % 3 else "last"])})
    return [*rows[20:], *rows[:20]]


def test_of_near_duplicates_the_first_is_kept(build):
    pytest.importorskip("datatrove")
    rows, first = near_duplicates(), dict[int, str]()
    for row in rows:
        first.setdefault(int(row["id"][1:]) // 3, row["id"])
    options = {"rows": rows, "filters": Filters(near_duplicates=True)}
    one, five = (build(f"in {parts}", parts=parts, **options) for parts in (1, 5))
    assert sorted(one.doc_ids) == sorted(first.values())
    assert one.meta["left_out"] == {"near-duplicate": 40}
    assert written(one) == written(five)


@pytest.mark.parametrize(
    "options", [{"tokenizer": None, "vocab_size": 290}, {"filters": Filters(near_duplicates=True)}]
)
def test_an_id_in_two_parts_is_refused_or_left_out(options, build):
    if "filters" in options:
        pytest.importorskip("datatrove")
    rows = [row | {"id": f"d{n % 23}"} for n, row in enumerate(near_duplicates())]
    with pytest.raises(InputError, match=r"texts\.jsonl:\d+: another document has the id 'd"):
        build(rows=rows, parts=5, **options)
    options = options | {"rows": rows, "skip_bad_rows": True, "overwrite": True}
    one, five = (build(f"in {parts}", parts=parts, **options) for parts in (1, 5))
    assert one.meta["left_out"]["id used before"] == (1 if "filters" in options else 37)
    assert written(one) == written(five)


def test_texts_are_left_out_by_language_and_quality(build):
    pytest.importorskip("datatrove")
    pytest.importorskip("py3langid")
    german = "Das Meer und das Land to be with gehören uns allen. " * 12
    rows = [{"text": text} for text in (GOOD, german, "The sea.", "# " * 90 + GOOD)]
    built = build(rows=rows, filters=Filters(("en",), quality=True))
    assert built.doc_ids == ["texts.jsonl:1"]
    reasons = {"language de": 1, "quality: short doc": 1, "quality: too many hashes": 1}
    assert built.meta["left_out"] == reasons
    both = build("both", rows=rows, filters=Filters(("en", "de"), quality=True))
    assert both.doc_ids == ["texts.jsonl:1", "texts.jsonl:2"]


@pytest.fixture
def rebuild(build, corpus):
    """Build a corpus of records as `corpus` is built, with its tokenizer."""
    options = {"heldout_fraction": 0.3, "tokenizer": corpus.path / "tokenizer", "parts": 6}
    return lambda rows, **others: build(rows=rows, overwrite=True, **options | others)


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


def test_the_split_follows_the_rule_in_the_metadata(corpus, rebuild):
    digests = (hashlib.sha256(record["id"].encode()).digest() for record in RECORDS)
    keys = [int.from_bytes(digest[:8], "little") / 2**64 for digest in digests]
    held_out = [n for n, key in enumerate(keys) if key < 0.3]
    assert 0 < len(held_out) < len(RECORDS)
    assert corpus.split("heldout").tolist() == held_out
    assert corpus.split("heldout", 3, 9).tolist() == [n for n in held_out if 3 <= n < 9]
    both = [*corpus.split("train").tolist(), *held_out]
    assert sorted(both) == corpus.split("all").tolist() == list(range(len(RECORDS)))
    tokens = corpus.lengths[held_out].sum()
    assert corpus.meta["heldout"] == {"documents": len(held_out), "tokens": tokens}
    # A fraction that is too small holds one document out.
    small = rebuild(RECORDS, heldout_fraction=1e-9)
    assert small.split("heldout").tolist() == [first := int(np.argmin(keys))]
    assert small.meta["heldout"] == {"documents": 1, "tokens": small.lengths[first]}


@pytest.mark.parametrize("count", [1, 5])
def test_one_of_two_or_more_documents_is_held_out(count, rebuild):
    records = [{"id": f"{number}.txt", "text": "The sea was calm. " * 9} for number in range(count)]
    # Some parts are empty.
    built = rebuild(records, heldout_fraction=0.05)
    assert len(built.split("heldout")) == built.meta["heldout"]["documents"] == (count > 1)
    assert built.meta["heldout"]["tokens"] == built.lengths[built.split("heldout")].sum()
    stated = [{"text": "a", "split": "train"}] * count
    for none in (rebuild(records, heldout_fraction=0), rebuild(stated)):
        assert len(none.split("heldout")) == 0


STATED = (" Train", "training", "test", "validation", "", "held-out", "eval", "dev")


def test_a_split_column_overrides_the_rule(corpus, rebuild):
    rows = [record | {"split": split} for record, split in zip_longest(RECORDS, STATED)]
    stated = rebuild(rows)
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
    unknown = [*rows[:9], rows[9] | {"split": "tets"}, *rows[10:]]
    with pytest.raises(InputError, match=r"'long-4' has the split 'tets': .*--split-column ''"):
        rebuild(unknown)
    ignored = rebuild(unknown, columns=Columns(split=""))
    assert ignored.fingerprint == corpus.fingerprint


def test_equal_inputs_give_equal_bytes_and_fingerprints(corpus, rebuild):
    again = rebuild(RECORDS, tokenizer=None, vocab_size=300)
    assert contents(again.path) == contents(corpus.path)
    changed = [*RECORDS[:-1], {**RECORDS[-1], "license": "other"}]
    assert rebuild(changed).fingerprint != corpus.fingerprint


def test_a_large_vocabulary_is_stored_in_four_bytes(build, tmp_path):
    words = {f"w{n}": n for n in range(70_000)} | {"</s>": 70_000, "<unk>": 70_001}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path / "t")
    corpus = build(rows=[{"text": "w69999 w3 </s> zebra"}], tokenizer=tmp_path / "t")
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


@pytest.mark.parametrize("name", ["build", "estimate"])
def test_what_a_build_and_its_dry_run_refuse(name, request, tmp_path):
    refused = partial(request.getfixturevalue(name), rows=[{"text": "a"}, {"text": 3}])
    for options, message in (
        ({"vocab_size": 12}, "257"),
        ({"heldout_fraction": float("nan")}, "below 1"),
        ({"vocab_size": 300}, r"texts\.jsonl:2: the text is 3"),
    ):
        with pytest.raises(InputError, match=message):
            refused(tokenizer=None, **options)
    assert not (tmp_path / "out").exists()


def test_estimated_tokens_are_those_of_the_corpus(build, estimate, tmp_path, monkeypatch):
    """Exactly where all of it is tokenised, and nearly where its beginning is."""
    rows = [{"text": f"{n} " + "a line of text " * (n % 4 + 1)} for n in range(9000)]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    built, exact = build("built", inputs=path), estimate(inputs=path)
    assert (exact.figures["documents"], exact.figures["tokens"]) == (9000, built.num_tokens)
    size = sum(file.stat().st_size for file in built.path.glob("*-0*"))
    assert exact.disk_bytes == pytest.approx(size, rel=0.05)
    monkeypatch.setattr(module, "MEASURED_SECONDS", 0.0)
    cost = estimate(inputs=path)
    assert cost.unknown == ("Whether the rest is like the first 4,096 documents.",)
    assert not exact.unknown
    assert cost.figures["documents"] == pytest.approx(9000, rel=0.1)
    assert cost.figures["tokens"] == pytest.approx(built.num_tokens, rel=0.1)
    assert cost.seconds > 0
    # Training a tokenizer takes its time, here at least a second.
    train = module.train_tokenizer
    monkeypatch.setattr(module, "train_tokenizer", lambda *of: time.sleep(1) or train(*of))
    assert estimate(inputs=path, tokenizer=None, vocab_size=300).seconds > 1
    streamed = estimate(inputs=HubDataset("json", data_files=(str(path),)))
    assert (streamed.seconds, streamed.figures["tokens"], streamed.disk_bytes) == (None, None, None)
    assert "does not say before it is read" in streamed.unknown[1]
    assert not (tmp_path / "out").exists()
