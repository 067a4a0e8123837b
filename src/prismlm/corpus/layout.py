"""The names, schemas and rules of a corpus directory, and whether it is whole."""

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
TOKENIZER_DIRECTORY = "tokenizer"
SPLIT_RULE = (
    "held out if int(sha256(doc_id)[:8], little endian) / 2**64 < heldout_fraction, else train"
)
STATED_RULE = f"as the document's own split says; without one, {SPLIT_RULE}"
NONE_HELD_OUT = (
    "holds no document out, so there is nothing to measure on. Build it again with `prismlm corpus "
    "build`, from at least two documents and with a --heldout share above 0; or, if all of them "
    "say that they are for training, with --split-column ''."
)


def strings(*names: str) -> list[tuple[str, pa.DataType]]:
    """Return columns of text, as a schema is made of."""
    return [(name, pa.string()) for name in names]


# What is known of a document.
FACTS = strings("doc_id", "source", "domain", "license", "title", "url")
DOCUMENT_SCHEMA = pa.schema([*FACTS, ("start", pa.int64()), ("length", pa.int64())])
# With the part that a document says it belongs to; null where its id decides.
STORED_SCHEMA = DOCUMENT_SCHEMA.append(pa.field("split", pa.string()))
TEXT_SCHEMA = pa.schema([("doc_id", pa.string()), ("text", pa.large_string())])
# Of a shard, in the order in which they are listed.
TOKENS, DOCUMENTS, TEXTS = "tokens-{:05d}.bin", "documents-{:05d}.parquet", "text-{:05d}.parquet"


def is_corpus(path: Path) -> bool:
    """Say whether ``path`` is a directory that a corpus was built in."""
    return (path / META_FILE).is_file()


def is_held_out(doc_id: str, heldout_fraction: float, stated: str | None = None) -> bool:
    """Say whether a document is held out: as ``stated``, ``train`` or ``heldout``, or by its id.

    Adding documents thus moves none.
    """
    return stated == "heldout" if stated is not None else split_key(doc_id) < heldout_fraction


def split_key(doc_id: str) -> float:
    """Return the number in [0, 1) of an id; documents below the held-out fraction are held out."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8], "little") / 2**64


def held_out(documents: pa.Table, split: dict[str, Any]) -> np.ndarray:
    """Say of each document of a table whether it is held out, by ``corpus.json``: bool [n]."""
    ids = documents["doc_id"].to_pylist()
    stated = documents["split"].to_pylist() if split.get("stated") else [None] * len(ids)
    fraction = split["heldout_fraction"]
    found = (is_held_out(i, fraction, part) for i, part in zip(ids, stated, strict=True))
    return np.fromiter(found, dtype=bool, count=len(ids))


def check_complete(directory: Path, meta: Any) -> None:
    """Raise FormatError unless ``corpus.json`` has its digest, and files the sizes in it."""
    where = directory / META_FILE
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise FormatError(f"{where} does not describe a corpus.")
    if meta.get("version") != FORMAT_VERSION:
        raise FormatError(
            f"{directory} has corpus format {meta.get('version')}; this version of prismlm reads "
            f"{FORMAT_VERSION}. Build the corpus again."
        )
    if meta.get("digest") != digest(meta):
        raise FormatError(f"{where} was changed since it was written. Build the corpus again.")
    check_files(directory, meta["shards"])
    if not (directory / TOKENIZER_DIRECTORY / "tokenizer.json").is_file():
        raise FormatError(
            f"{directory} is incomplete: tokenizer/tokenizer.json is missing. Build it again."
        )


def digest(meta: dict[str, Any]) -> str:
    """Return the digest of ``corpus.json``, of all but itself."""
    return fingerprints.of_json({name: part for name, part in meta.items() if name != "digest"})


def check_files(directory: Path, shards: list[dict[str, Any]]) -> None:
    """Raise FormatError for a file of these shards that is missing, or of another size."""
    files = {name: size for shard in shards for name, size in shard["files"].items()}
    for name, size in files.items():
        path = directory / name
        if not path.is_file():
            raise FormatError(f"{directory} is incomplete: {name} is missing. Build it again.")
        if path.stat().st_size != size:
            raise FormatError(
                f"{path} has {path.stat().st_size} bytes, expected {size}: it is cut off or was "
                "changed. Build the corpus again."
            )
