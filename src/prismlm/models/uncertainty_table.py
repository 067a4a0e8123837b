"""The file of a table of uncertainty codes, ``uncertainty_feedback.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prismlm.errors import FormatError, check_path
from prismlm.files import atomic_file, check_json, json_text
from prismlm.outputs import check_outputs

UNCERTAINTY_FILE = "uncertainty_feedback.safetensors"
FORMAT_VERSION = 1
META = {"levels": int, "passes": int, "model": str, "places": dict[str, str]}


class SavedTable(NamedTuple):
    """What a file holds: tensors ``embedding`` and ``seen``, the rest in its metadata.

    Attributes:
        embedding: [K, d].
        seen: bool [levels], which codes were fed in training; None in older files.
        levels: how many codes there are.
        passes: of a call with several new tokens.
        model: fingerprint of the model's input embeddings.
        places: names of the model's decoder and embeddings, ``decoder`` and ``embeddings``, where
            they were given.
    """

    embedding: Tensor
    seen: Tensor | None
    levels: int
    passes: int
    model: str
    places: dict[str, str]


def has_uncertainty(directory: Path | str) -> bool:
    """Say whether a directory holds a table of codes."""
    return (Path(directory) / UNCERTAINTY_FILE).is_file()


def write_table(directory: Path | str, saved: SavedTable) -> None:
    """Write a table beside the checkpoint of its model."""
    path = check_path("the directory", directory) / UNCERTAINTY_FILE
    check_outputs(path, overwrite=True)
    meta = {"format_version": FORMAT_VERSION} | {name: getattr(saved, name) for name in META}
    tensors = {"embedding": saved.embedding, "seen": saved.seen}
    held = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
    # One entry: safetensors writes several in another order each time.
    with atomic_file(path) as temporary:
        save_file(held, str(temporary), metadata={"uncertainty_feedback": json_text(meta)})


def read_table(directory: Path | str) -> SavedTable:
    """Read a table.

    Raises:
        FormatError: the file is missing, damaged or of another version.
    """
    path = check_path("the directory", directory) / UNCERTAINTY_FILE
    if not path.is_file():
        raise FormatError(
            f"{directory} has no {UNCERTAINTY_FILE}: train the model with uncertainty feedback, or "
            "attach a new table with prismlm.attach_uncertainty."
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            opened: Any = file
            meta = json.loads((opened.metadata() or {})["uncertainty_feedback"])
            table = opened.get_tensor("embedding")
            seen = opened.get_tensor("seen") if "seen" in opened.keys() else None  # noqa: SIM118
        version = meta["format_version"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path} cannot be read: {error!r}. Put a whole copy of the file there, or train again."
        ) from error
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version!r}; this prismlm reads {FORMAT_VERSION}. Use the "
            "prismlm that wrote it, or train again."
        )
    # Older files name no places.
    meta = {"places": {}} | meta
    check_json(meta, META, str(path))
    floats = table.ndim == 2 and table.is_floating_point() and bool(table.isfinite().all())
    if not floats or not 2 <= len(table) <= meta["levels"] or meta["passes"] < 1:
        raise FormatError(
            f"{path} holds {table.dtype} {list(table.shape)} for {meta['levels']} levels and "
            f"{meta['passes']} passes: expected 2 to as many rows as levels, all finite, and a "
            "pass. Put a whole copy of the file there, or train again."
        )
    return SavedTable(table, seen, **{name: meta[name] for name in META})
