from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prismlm.corpus import Corpus, build_corpus
from tests.helpers.records import RECORDS, write_jsonl


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Seventeen documents in several shards."""
    directory = tmp_path_factory.mktemp("corpus")
    path = write_jsonl(directory / "texts.jsonl", RECORDS)
    return build_corpus(path, directory / "built", vocab_size=300, parts=6, heldout_fraction=0.3)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Corpus]:
    """Build a corpus from a list of texts."""

    def from_texts(texts: list[str], **options: Any) -> Corpus:
        records = [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)]
        path = write_jsonl(tmp_path / "texts.jsonl", records)
        return build_corpus(path, tmp_path / "built", vocab_size=300, overwrite=True, **options)

    return from_texts
