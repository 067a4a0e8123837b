from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prismlm.corpus import Corpus, build_corpus

WORDS = "the model reads a window of tokens and predicts which one follows".split()  # noqa: SIM905

RECORDS: list[dict[str, Any]] = [
    {"id": "plain", "text": "The heart pumps blood.", "domain": "medicine", "license": "CC0"},
    {"id": "accents", "text": "Żółć – naïve café 🙂👩‍👩‍👧 漢字\n", "domain": "language"},
    {"id": "marker", "text": "It ends with <|endoftext|> in the middle.", "title": "Marker"},
    {"id": "spaces", "text": "  two\t\ttabs   and\r\n\r\nlines  ", "source": "typed", "url": "x:y"},
    {"id": "one", "text": "a", "domain": "medicine"},
    *(
        {
            "id": f"long-{n}",
            "text": " ".join(WORDS[(n * 7 + i * i) % len(WORDS)] for i in range(40 + 90 * n)),
            "domain": "computing",
            "license": "MIT",
        }
        for n in range(12)
    ),
]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Seventeen documents in several shards."""
    directory = tmp_path_factory.mktemp("corpus")
    path = write_jsonl(directory / "texts.jsonl", RECORDS)
    return build_corpus(
        path, directory / "built", vocab_size=300, shard_tokens=900, heldout_fraction=0.3
    )


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Corpus]:
    """Build a corpus from a list of texts."""

    def from_texts(texts: list[str], **options: Any) -> Corpus:
        records = [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)]
        path = write_jsonl(tmp_path / "texts.jsonl", records)
        return build_corpus(path, tmp_path / "built", vocab_size=300, overwrite=True, **options)

    return from_texts
