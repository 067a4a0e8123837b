"""The names, schemas and rules of a corpus directory, shared by its writer and its reader."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa

FORMAT = "prismlm-corpus"
FORMAT_VERSION = 1
META_FILE = "corpus.json"
TOKENIZER_DIRECTORY = "tokenizer"
SPLIT_RULE = (
    "held out if int(sha256(doc_id)[:8], little endian) / 2**64 < heldout_fraction, else train"
)

DOCUMENT_SCHEMA = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("doc_id", "source", "domain", "license", "title", "url")
        ),
        ("start", pa.int64()),
        ("length", pa.int64()),
    ]
)
TEXT_SCHEMA = pa.schema([("doc_id", pa.string()), ("text", pa.large_string())])


def tokens_file(shard: int) -> str:
    """Return the name of a shard's token file."""
    return f"tokens-{shard:05d}.bin"


def documents_file(shard: int) -> str:
    """Return the name of a shard's table of documents."""
    return f"documents-{shard:05d}.parquet"


def text_file(shard: int) -> str:
    """Return the name of a shard's table of texts."""
    return f"text-{shard:05d}.parquet"


def is_corpus(path: Path) -> bool:
    """Say whether ``path`` is a directory that a corpus was built in."""
    return (path / META_FILE).is_file()


def is_held_out(doc_id: str, heldout_fraction: float) -> bool:
    """Say whether a document is held out: by its id alone, so that more documents move none."""
    key = int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8], "little")
    return key / 2**64 < heldout_fraction
