"""The names, schemas and rules of a corpus directory, and whether it is whole."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from prismlm import fingerprints
from prismlm.errors import FormatError
from prismlm.files import check_json

FORMAT = "prismlm-corpus"
FORMAT_VERSION = 2
META_FILE = "corpus.json"
TOKENIZER_DIRECTORY = "tokenizer"
SPLIT_RULE = (
    "held out if int(sha256(doc_id)[:8], little endian) / 2**64 < heldout_fraction, else train"
)
STATED_RULE = f"as the document's own split says; without one, {SPLIT_RULE}"


def strings(*names: str) -> list[tuple[str, pa.DataType]]:
    """Return columns of text, as a schema is made of."""
    return [(name, pa.string()) for name in names]


# What is known of a document.
FACTS = strings("doc_id", "source", "domain", "license", "title", "url")
DOCUMENT_SCHEMA = pa.schema(
    [
        *FACTS,
        ("start", pa.int64()),
        ("length", pa.int64()),
    ]
)
# With the part that a document says it belongs to; null where its id decides.
STORED_SCHEMA = DOCUMENT_SCHEMA.append(pa.field("split", pa.string()))
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


NONE_HELD_OUT = (
    "holds no document out, so there is nothing to measure on. Build it again with `prismlm corpus "
    "build`, from at least two documents and with a --heldout share above 0; or, if all of them "
    "say that they are for training, with --split-column ''."
)


def is_corpus(path: Path) -> bool:
    """Say whether ``path`` is a directory that a corpus was built in."""
    return (path / META_FILE).is_file()


def is_held_out(doc_id: str, heldout_fraction: float, stated: str | None = None) -> bool:
    """Say whether a document is held out: as it says itself, or by its id alone.

    More documents thus move none.

    Args:
        doc_id: its id.
        heldout_fraction: the share of documents to hold out.
        stated: ``train`` or ``heldout``, where it says so itself.
    """
    return stated == "heldout" if stated is not None else split_key(doc_id) < heldout_fraction


def split_key(doc_id: str) -> float:
    """Return the number in [0, 1) of an id; documents below the held-out fraction are held out."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8], "little") / 2**64


def held_out(documents: pa.Table, split: dict[str, Any]) -> np.ndarray:
    """Say of each document of a table whether it is held out: bool [n].

    Args:
        documents: with ``doc_id``, and with ``split`` where documents have stated their part.
        split: what ``corpus.json`` says of it.
    """
    ids = documents["doc_id"].to_pylist()
    stated = documents["split"].to_pylist() if split.get("stated") else [None] * len(ids)
    fraction = split["heldout_fraction"]
    found = (is_held_out(i, fraction, part) for i, part in zip(ids, stated, strict=True))
    return np.fromiter(found, dtype=bool, count=len(ids))


_COUNTS = {"documents": int, "tokens": int}
PROMISED = {
    "dtype": Literal["uint16", "uint32"],
    "tokenizer": {
        "fingerprint": str,
        "vocab_size": int,
        "eos_token": str,
        "eos_token_id": int,
        "prefix": list[int] | None,
        "suffix": list[int] | None,
    },
    "split": {"heldout_fraction": float},
    "counts": {**_COUNTS, "characters": int, "skipped": int},
    "digests": dict[str, str],
    "shards": [{**_COUNTS, "files": dict[str, int], "digest": str}],
    "digest": str,
}


def check_complete(directory: Path, meta: Any) -> None:
    """Check what ``corpus.json`` promises against the files, by their sizes.

    Raises:
        FormatError: names what is of another version, missing or damaged.
    """
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise FormatError(f"{directory / META_FILE} does not describe a corpus.")
    if meta.get("version") != FORMAT_VERSION:
        raise FormatError(
            f"{directory} has corpus format {meta.get('version')}; this version of prismlm reads "
            f"{FORMAT_VERSION}. Build the corpus again."
        )
    missing = set(PROMISED) - meta.keys()
    if missing:
        raise FormatError(
            f"{directory / META_FILE} lacks {', '.join(sorted(missing))}. Build the corpus again."
        )
    where, shards = str(directory / META_FILE), meta["shards"]
    check_json(meta, PROMISED, where)
    noted = {name: value for name, value in meta.items() if name != "digest"}
    if meta["digest"] != fingerprints.of_json(noted):
        raise FormatError(f"{where} was changed since it was written. Build the corpus again.")
    if any(sum(shard[what] for shard in shards) != meta["counts"][what] for what in _COUNTS):
        raise FormatError(f"{where} does not agree with itself. Build the corpus again.")
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
    if not (directory / TOKENIZER_DIRECTORY / "tokenizer.json").is_file():
        raise FormatError(
            f"{directory} is incomplete: tokenizer/tokenizer.json is missing. Build it again."
        )
