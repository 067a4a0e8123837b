"""Whether a corpus directory is whole, without reading the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prismlm.corpus import layout
from prismlm.errors import FormatError


def check_complete(directory: Path, meta: Any) -> None:
    """Check what ``corpus.json`` promises against the files, by their sizes.

    Raises:
        FormatError: names what is of another version, missing or damaged.
    """
    if not isinstance(meta, dict) or meta.get("format") != layout.FORMAT:
        raise FormatError(f"{directory / layout.META_FILE} does not describe a corpus.")
    if meta.get("version") != layout.FORMAT_VERSION:
        raise FormatError(
            f"{directory} has corpus format {meta.get('version')}; this version of prismlm reads "
            f"{layout.FORMAT_VERSION}. Build the corpus again."
        )
    missing = {"dtype", "tokenizer", "split", "counts", "digests", "shards"} - meta.keys()
    if missing:
        raise FormatError(
            f"{directory / layout.META_FILE} lacks {', '.join(sorted(missing))}. "
            "Build the corpus again."
        )
    files = {name: size for shard in meta["shards"] for name, size in shard["files"].items()}
    for name, size in files.items():
        path = directory / name
        if not path.is_file():
            raise FormatError(f"{directory} is incomplete: {name} is missing. Build it again.")
        if path.stat().st_size != size:
            raise FormatError(
                f"{path} has {path.stat().st_size} bytes, expected {size}: it is cut off or was "
                "changed. Build the corpus again."
            )
    if not (directory / layout.TOKENIZER_DIRECTORY / "tokenizer.json").is_file():
        raise FormatError(
            f"{directory} is incomplete: tokenizer/tokenizer.json is missing. Build it again."
        )
