"""What a build would cost: token counts of documents in packed and plain files, and disk."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import HubDataset, build_corpus, estimate_build
from prismlm.corpus import build as module
from prismlm.files import json_text
from tests.helpers.records import write_jsonl


def text(rng: random.Random) -> str:
    words = ("the", "court", "patient", "reads", "a", "line", "你好世界", "训练", "appeal")
    return " ".join(rng.choices(words, k=rng.randint(50, 800)))


def written(kind: str, texts: list[str], directory: Path) -> Path:
    path = directory / f"texts.{kind}"
    rows = [{"id": str(n), "text": text} for n, text in enumerate(texts)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = "".join(json_text(row, ensure_ascii=False) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    return path


def test_tokens_of_packed_and_plain_files_are_those_of_the_corpus(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly where all of it is tokenised, and nearly where a sample is."""
    rng = random.Random(0)
    texts = [text(rng) for _ in range(60)]
    paths = {kind: written(kind, texts, tmp_path) for kind in ("jsonl", "jsonl.gz", "parquet")}
    given: dict[str, Any] = {"tokenizer": tiny_corpus / "tokenizer"}
    built = build_corpus(paths["jsonl"], tmp_path / "built", **given)
    exact = estimate_build(paths["jsonl"], tmp_path / "out", **given)
    assert (exact.documents, exact.tokens) == (60, built.num_tokens)
    size = sum(file.stat().st_size for file in built.path.glob("*-0*"))
    assert exact.disk_bytes == pytest.approx(size, rel=0.05)
    monkeypatch.setattr(module, "SAMPLE_CHARACTERS", 5_000)
    for kind, path in paths.items():
        found = estimate_build(path, tmp_path / "out", **given)
        assert found.documents == 60, kind
        assert found.sampled_documents < 40, kind
        assert found.tokens == pytest.approx(built.num_tokens, rel=0.25), kind
        assert found.seconds > 0
    assert not (tmp_path / "out").exists()


def test_a_stream_that_does_not_say_how_much_it_holds(tiny_corpus, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "t.jsonl", [{"text": f"{n} a line " * 40} for n in range(900)])
    monkeypatch.setattr(module, "READING_SECONDS", 0.0)
    found = estimate_build(
        HubDataset(str(tmp_path)), tmp_path / "out", tokenizer=tiny_corpus / "tokenizer"
    )
    assert (found.seconds, found.tokens, found.disk_bytes) == (None, None, None)
    assert "does not say before it is read" in found.unknown[1]


def test_bad_rows_are_refused_by_a_dry_run_too(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl:2: the text is a number"):
        estimate_build(path, tmp_path / "out", vocab_size=300)
    found = estimate_build(path, tmp_path / "out", vocab_size=300, skip_bad_rows=True)
    assert found.documents == 1
