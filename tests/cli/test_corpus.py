from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Corpus
from tests.helpers.records import write_jsonl


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rows = [{"id": f"d{n}", "text": f"text number {n} " * 50, "domain": "d"} for n in range(40)]
    rows[7]["license"] = rows[8]["license"] = "CC0"
    return write_jsonl(tmp_path / "texts.jsonl", rows)


def test_build_then_info(prism, document, texts, tmp_path):
    out, directory = tmp_path / "out", tmp_path / "in"
    directory.mkdir()
    (directory / "texts.jsonl").symlink_to(texts)
    (directory / "scan.pdf").write_bytes(b"x")
    built = prism("corpus", "build", texts, directory, "--out", out, "--vocab-size", 300)
    assert "Tokenising" in built.stderr
    words = " ".join(built.stdout.split())
    for part in ("documents 40", "files read 1", "not read .pdf 1"):
        assert part in words
    assert "100.0%" in built.stdout
    info = prism("corpus", "info", out)
    assert (info.stdout, info.stderr) == (built.stdout, "")
    summary = document("corpus", "info", out)
    assert summary["fingerprint"] == Corpus.open(out).fingerprint
    tokens = summary["counts"]["tokens"]
    assert summary["counts"]["documents"] == 40
    (domain,), (unknown, free) = summary["domains"], summary["licenses"]
    assert domain == {"domain": "d", "documents": 40, "tokens": tokens, "share": 1.0}
    assert (unknown["license"], free["license"], free["documents"]) == ("unknown", "CC0", 2)
    assert unknown["tokens"] + free["tokens"] == tokens


def test_the_last_part_writes_the_corpus(prism, document, refused, texts, tmp_path):
    whole = document("corpus", "build", texts, "--out", tmp_path / "whole", "--vocab-size", 300)
    tokenizer = ("--tokenizer", tmp_path / "whole" / "tokenizer")
    build = ("corpus", "build", texts, "--out", tmp_path / "out", *tokenizer)
    first = document(*build, "--shard", "2/2")
    assert first == {"corpus": None, "shards": 2, "done": [2], "left": [1]}
    assert "leave out --vocab-size" in refused(*build, "--vocab-size", 300)
    assert "parts: 2 → 3" in refused(*build, "--shard", "1/3")
    last = document(*build, "--shard", "1/2")
    assert last["fingerprint"] == whole["fingerprint"]


def test_dry_run_writes_nothing(prism, document, texts, tmp_path):
    arguments = ("corpus", "build", texts, "--out", tmp_path / "out", "--dry-run")
    assert document(*arguments)["documents"] == 40
    assert "Nothing was written" in prism(*arguments).stdout
    sample = document("corpus", "build", "sample", "--out", tmp_path / "out", "--dry-run")
    assert sample["documents"] > 3000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.jsonl"]


def test_every_column_can_be_named(prism, tmp_path):
    names = ["id", "text", "source", "domain", "license", "title", "url"]
    values = {name: f"the {name}" for name in names} | {"split": "test"}
    table, out = tmp_path / "t.parquet", tmp_path / "out"
    pq.write_table(pa.table({f"my_{name}": [value] for name, value in values.items()}), table)
    options = [word for name in values for word in (f"--{name}-column", f"my_{name}")]
    result = prism("corpus", "build", table, "--out", out, *options)
    corpus = Corpus.open(out)
    assert corpus.text(0) == "the text"
    for name in names[2:]:
        assert corpus.column(name) == [f"the {name}"]
    assert corpus.doc_ids == ["the id"]
    assert corpus.split("heldout").tolist() == [0]
    assert "by their own split train 0, heldout 1" in " ".join(result.stdout.split())
