"""File names, schemas and split rule of a corpus directory, and checks that it is complete."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prismlm import fingerprints
from prismlm.errors import FormatError

FORMAT = "prismlm-corpus"
FORMAT_VERSION = 2
META_FILE = "corpus.json"
REBUILD = "Build the corpus again."
TOKENIZER_DIRECTORY = "tokenizer"
SPLIT_RULE = (
    "held out if int(sha256(doc_id)[:8], little endian) / 2**64 < heldout_fraction, else train"
)
STATED_RULE = f"as the document's own split says; without one, {SPLIT_RULE}"
NONE_HELD_OUT = (
    "has no held-out documents, so there is nothing to measure on. Build it again with `prismlm "
    "corpus build`, from at least two documents and with a --heldout share above 0; or, if their "
    "split column says that all are for training, with --split-column ''."
)


def strings(*names: str) -> list[tuple[str, pa.DataType]]:
    """Return string columns for a schema."""
    return [(name, pa.string()) for name in names]


# Metadata of a document.
FACTS = strings("doc_id", "source", "domain", "license", "title", "url")
DOCUMENT_SCHEMA = pa.schema([*FACTS, ("start", pa.int64()), ("length", pa.int64())])
# With the split that a document states; null if its id decides.
STORED_SCHEMA = DOCUMENT_SCHEMA.append(pa.field("split", pa.string()))
TEXT_SCHEMA = pa.schema([("doc_id", pa.string()), ("text", pa.large_string())])
DOCUMENTS_AT_ONCE = 2**16
# File names of a shard.
TOKENS, DOCUMENTS, TEXTS = "tokens-{:05d}.bin", "documents-{:05d}.parquet", "text-{:05d}.parquet"


def map_file(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """Memory-map a file of records, [n].

    Unlike that of numpy, the map holds no file descriptor, of which a process may have too few.
    """
    with pa.memory_map(str(path)) as file:
        return np.frombuffer(file.read_buffer(), dtype)


def is_corpus(path: Path) -> bool:
    """Return whether ``path`` is a corpus directory."""
    return (path / META_FILE).is_file()


def split_key(doc_id: str) -> float:
    """Hash an id to [0, 1); documents below the held-out fraction are held out."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8], "little") / 2**64


def is_held_out(doc_id: str, heldout_fraction: float, stated: str | None = None) -> bool:
    """Return whether a document is held out: as ``stated`` by its split, or by its id."""
    return stated == "heldout" if stated is not None else split_key(doc_id) < heldout_fraction


def held_out(documents: pa.Table, split: dict[str, Any]) -> np.ndarray:
    """Return which documents of a table are held out under the split rule, bool [n]."""
    flags, fraction = list[bool](), split["heldout_fraction"]
    for batch in documents.to_batches(DOCUMENTS_AT_ONCE):
        ids = batch["doc_id"].to_pylist()
        stated = batch["split"].to_pylist() if split.get("stated") else [None] * len(ids)
        flags += [is_held_out(i, fraction, part) for i, part in zip(ids, stated, strict=True)]
    return np.array(flags, bool)


def check_complete(directory: Path, meta: Any) -> None:
    """Raise FormatError unless ``corpus.json`` matches its digest, and the files their sizes."""
    where = directory / META_FILE
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise FormatError(f"{where} does not describe a corpus.")
    if meta.get("version") != FORMAT_VERSION:
        raise FormatError(
            f"{directory} has corpus format {meta.get('version')}; this version of prismlm reads "
            f"{FORMAT_VERSION}. {REBUILD}"
        )
    described = {name: value for name, value in meta.items() if name != "digest"}
    if meta.get("digest") != fingerprints.of_json(described):
        raise FormatError(f"{where} was changed since it was written. {REBUILD}")
    for name, size in (item for shard in meta["shards"] for item in shard["files"].items()):
        path = directory / name
        actual = path.stat().st_size if path.is_file() else 0
        if actual != size:
            raise FormatError(
                f"{path} has {actual} bytes, expected {size}: it is missing, truncated or changed. "
                f"{REBUILD}"
            )
