from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.corpus import Columns, Corpus, Document, build_corpus, layout
from prismlm.corpus.build import training_texts
from prismlm.corpus.windows import BlockOrder
from prismlm.errors import InputError
from prismlm.run_state import writing
from tests.helpers.records import RECORDS, write_jsonl


def _bytes_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_the_directory_is_what_the_format_says(corpus: Corpus) -> None:
    shards = len(corpus.meta["shards"])
    assert shards > 2
    position = 0
    ids: list[str] = []
    for shard in range(shards):
        documents = pq.read_table(corpus.path / f"documents-{shard:05d}.parquet").to_pylist()
        texts = pq.read_table(corpus.path / f"text-{shard:05d}.parquet").to_pylist()
        tokens = np.fromfile(corpus.path / f"tokens-{shard:05d}.bin", dtype="<u2")
        assert [row["doc_id"] for row in documents] == [row["doc_id"] for row in texts]
        ids += [row["doc_id"] for row in documents]
        first = position
        for row, text in zip(documents, texts, strict=True):
            assert row["start"] == position
            here = tokens[position - first :][: row["length"]]
            assert here[-1] == corpus.eos_token_id
            assert corpus.eos_token_id not in here[:-1]
            assert corpus.tokenizer.decode(here[:-1]) == text["text"]
            position += row["length"]
        assert position - first == len(tokens)
    assert ids == [record["id"] for record in RECORDS]
    assert corpus.meta["counts"] == {
        "documents": len(RECORDS),
        "tokens": position,
        "characters": sum(len(record["text"]) for record in RECORDS),
        "skipped": 0,
    }
    assert {row["domain"]: row["documents"] for row in corpus.meta["domains"]} == {
        None: 2,
        "computing": 12,
        "language": 1,
        "medicine": 2,
    }


def test_the_split_is_the_rule_in_the_metadata(corpus: Corpus) -> None:
    held_out = [
        n
        for n, record in enumerate(RECORDS)
        if int.from_bytes(hashlib.sha256(record["id"].encode()).digest()[:8], "little") / 2**64
        < 0.3
    ]
    assert 0 < len(held_out) < len(RECORDS)
    assert corpus.split("heldout").tolist() == held_out
    both = [*corpus.split("train").tolist(), *held_out]
    assert sorted(both) == corpus.split("all").tolist() == list(range(len(RECORDS)))
    assert corpus.meta["heldout"]["documents"] == len(held_out)
    assert corpus.meta["heldout"]["tokens"] == corpus.lengths[held_out].sum()


def test_a_fraction_that_is_too_small_holds_one_document_out(
    corpus: Corpus, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", RECORDS)
    options = {"vocab_size": 300, "shard_tokens": 900, "heldout_fraction": 1e-9}
    few = build_corpus(path, tmp_path / "built", **options)
    keys = [layout.split_key(record["id"]) for record in RECORDS]
    assert few.split("heldout").tolist() == [int(np.argmin(keys))]
    assert few.meta["heldout"] == {
        "documents": 1, "tokens": int(few.lengths[np.argmin(keys)])
    }  # fmt: skip
    for name in ("counts", "domains", "licenses"):
        assert few.meta[name] == corpus.meta[name]


STATED = dict(
    enumerate((" Train", "training", "test", "validation", "", "held-out", "eval", "dev"))
)


def stated_corpus(directory: Path, **columns: str) -> Corpus:
    records = [
        {**record, "split": STATED[n]} if n in STATED else record
        for n, record in enumerate(RECORDS)
    ]
    path = write_jsonl(directory / "texts.jsonl", records)
    return build_corpus(
        path,
        directory / "built",
        vocab_size=300,
        shard_tokens=900,
        heldout_fraction=0.3,
        columns=Columns(**columns),
        overwrite=True,
    )


def test_documents_that_say_their_part_are_in_it(corpus: Corpus, tmp_path: Path) -> None:
    stated = stated_corpus(tmp_path)
    out = {2, 3, 5, 6, 7} | {n for n in corpus.split("heldout").tolist() if n not in {0, 1}}
    assert stated.split("heldout").tolist() == sorted(out)
    assert out != set(corpus.split("heldout").tolist())
    assert stated.meta["heldout"]["documents"] == len(out)
    assert stated.meta["heldout"]["tokens"] == stated.lengths[sorted(out)].sum()
    assert stated.meta["split"]["stated"] == {"train": 2, "heldout": 5}
    assert stated.fingerprint != corpus.fingerprint
    # A part at a time, as an index reads it.
    order = BlockOrder.for_tokens(stated.num_tokens)
    grids = [order.windows(slot, stated, "heldout", 64, 48) for slot in range(order.count)]
    read = {int(number) for grid in grids for number in grid.document}
    assert read == {n for n in out if stated.lengths[n] > 1}


def test_a_split_that_is_none_is_refused_unless_it_is_not_read(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATED, 9, "tets")
    with pytest.raises(InputError, match=r"'long-4' has the split 'tets': .*--split-column ''"):
        stated_corpus(tmp_path)
    assert stated_corpus(tmp_path, split="").fingerprint == corpus.fingerprint


def test_the_same_inputs_give_the_same_bytes(corpus: Corpus, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", RECORDS)
    again = build_corpus(
        path, tmp_path / "b", vocab_size=300, shard_tokens=900, heldout_fraction=0.3
    )
    assert _bytes_of(again.path) == _bytes_of(corpus.path)


def test_the_fingerprint_follows_the_contents_alone(corpus: Corpus, tmp_path: Path) -> None:
    def built(name: str, records: list[dict[str, str]], shard_tokens: int) -> Corpus:
        path = write_jsonl(tmp_path / "texts.jsonl", records)
        return build_corpus(
            path,
            tmp_path / name,
            tokenizer=corpus.path / "tokenizer",
            shard_tokens=shard_tokens,
            heldout_fraction=0.3,
        )

    assert built("sharded", RECORDS, 50).fingerprint == corpus.fingerprint
    renamed = [*RECORDS[:-1], {**RECORDS[-1], "license": "other"}]
    assert built("license", renamed, 900).fingerprint != corpus.fingerprint


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    words = {f"w{n}": n for n in range(70_000)} | {"</s>": 70_000, "<unk>": 70_001}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path / "t")
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "w69999 w3 </s> zebra"}])
    corpus = build_corpus(path, tmp_path / "c", tokenizer=tmp_path / "t")
    assert corpus.tokens(0, 5).dtype == np.uint32
    assert corpus.tokens(0, 5).tolist()[:2] == [69_999, 3]
    assert corpus.tokens(0, 5).tolist()[3:] == [70_001, 70_000]
    assert corpus.excerpt(0, 2) == "w69999 w3"


def test_training_text_is_bounded_spread_and_repeatable() -> None:
    documents = [Document(f"d{n}", f"{n:04d}" * 25) for n in range(1000)]
    chosen = training_texts(iter(documents), 20_000)
    assert 8_000 < sum(map(len, chosen)) <= 20_000
    assert chosen == training_texts(iter(documents), 20_000)
    assert int(chosen[0][:4]) < 100
    assert int(chosen[-1][:4]) > 900
    assert training_texts(iter([Document("x", "long" * 99)]), 10) == ["long" * 99]


def test_what_exists_is_only_replaced_when_asked(build: Callable[..., Corpus]) -> None:
    corpus = build(["first"])
    before = _bytes_of(corpus.path)
    source = write_jsonl(corpus.path.parent / "t.jsonl", [{"text": "second"}])
    with pytest.raises(InputError, match="--overwrite"):
        build_corpus(source, corpus.path, vocab_size=300)
    broken = corpus.path.parent / "broken.jsonl"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="not valid JSON"):
        build_corpus(broken, corpus.path, vocab_size=300, overwrite=True)
    assert _bytes_of(corpus.path) == before
    replaced = build_corpus(source, corpus.path, vocab_size=300, overwrite=True)
    assert replaced.text(0) == "second"
    (corpus.path.parent / "notes").mkdir()
    with pytest.raises(InputError, match="not a corpus"):
        build_corpus(source, corpus.path.parent / "notes", overwrite=True)
    hidden = [path.name for path in corpus.path.parent.iterdir() if path.name.startswith(".")]
    assert not hidden


def test_a_corpus_does_not_replace_the_text_it_is_built_of(build: Callable[..., Corpus]) -> None:
    corpus = build(["first"])
    before = _bytes_of(corpus.path)
    (text,) = corpus.path.glob("text-*.parquet")
    link = corpus.path.parent / "link.parquet"
    link.symlink_to(text)
    for named in (text, link):
        with pytest.raises(InputError, match=r"lies in .* which the corpus would replace"):
            build_corpus(named, corpus.path, vocab_size=300, overwrite=True)
    assert _bytes_of(corpus.path) == before


def test_only_one_build_writes_an_output(build: Callable[..., Corpus]) -> None:
    corpus = build(["first"])
    before = _bytes_of(corpus.path)
    source = write_jsonl(corpus.path.parent / "t.jsonl", [{"text": "second"}])
    with writing(corpus.path), pytest.raises(InputError, match="written to by another process"):
        build_corpus(source, corpus.path, vocab_size=300, overwrite=True)
    assert _bytes_of(corpus.path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 12}, "257"),
        ({"heldout_fraction": 1.0}, "below 1"),
        ({"heldout_fraction": float("nan")}, "below 1"),
        ({"shard_tokens": 0}, "from 1 on"),
    ],
)
def test_arguments_out_of_range(options: dict[str, float], message: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])
    with pytest.raises(InputError, match=message):
        build_corpus(path, tmp_path / "out", **options)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "out").exists()
