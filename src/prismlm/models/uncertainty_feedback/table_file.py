"""The file of a table of uncertainty codes, ``uncertainty_feedback.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.errors import FormatError, check_path
from prismlm.files import atomic_file, check_json, json_text
from prismlm.models.uncertainty_feedback.place import decoder_and_embeddings
from prismlm.outputs import check_outputs

UNCERTAINTY_FILE = "uncertainty_feedback.safetensors"
FORMAT_VERSION = 1
PARTS = ("decoder", "embeddings")
META = {"levels": int, "passes": int, "model": str, "places": dict[str, str]}


class SavedTable(NamedTuple):
    """What a file holds.

    Attributes:
        table: [K, d].
        seen: bool [levels], which codes were fed in training; None in older files.
        levels: how many codes there are.
        passes: of a call with several new tokens.
        names: of the model's decoder and embeddings, ``decoder`` and ``embeddings``, where given.
    """

    table: Tensor
    seen: Tensor | None
    levels: int
    passes: int
    names: dict[str, str]


def has_uncertainty(directory: Path | str) -> bool:
    """Say whether a directory holds a table of codes."""
    return (Path(directory) / UNCERTAINTY_FILE).is_file()


def write_table(directory: Path | str, model: PreTrainedModel, saved: SavedTable) -> None:
    """Write a table beside the checkpoint of its model.

    The file is a safetensors file of ``embedding`` [K, d], in the table's dtype, and ``seen``, bool
    [levels]; its metadata has the format's version, levels, passes, the fingerprint of the model's
    input embeddings, and their and the decoder's names if those were given.
    """
    path = check_path("the directory", directory) / UNCERTAINTY_FILE
    check_outputs(path, overwrite=True)
    meta = {
        "format_version": FORMAT_VERSION,
        "levels": saved.levels,
        "passes": saved.passes,
        "model": fingerprints.of_tensor(_input_weight(model, saved.names)),
        "places": saved.names,
    }
    tensors = {"embedding": saved.table, "seen": saved.seen}
    held = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
    # One entry: safetensors writes several in another order each time.
    with atomic_file(path) as temporary:
        save_file(held, str(temporary), metadata={"uncertainty_feedback": json_text(meta)})


def read_table(
    directory: Path | str, model: PreTrainedModel, *, levels: int | None = None
) -> SavedTable:
    """Read the table that belongs to a model; see :func:`load_uncertainty`."""
    path = check_path("the directory", directory) / UNCERTAINTY_FILE
    if not path.is_file():
        raise FormatError(
            f"{directory} has no {UNCERTAINTY_FILE}: train the model with uncertainty feedback, or "
            "attach a new table with prismlm.attach_uncertainty."
        )
    table, seen, meta = _read(path)
    # Older files name no places.
    names = {part: name for part, name in meta["places"].items() if part in PARTS}
    saved = SavedTable(table, seen, meta["levels"], meta["passes"], names)
    if levels is not None and levels != saved.levels:
        raise FormatError(
            f"{path} has {saved.levels} levels, and {levels} were expected: codes of one mean "
            "nothing to the other. Leave levels out to use the file's, or train again."
        )
    weight = _input_weight(model, saved.names)
    if meta["model"] != fingerprints.of_tensor(weight):
        raise FormatError(
            f"{path} was trained with other input embeddings than the model's (its vectors are "
            f"{table.dtype} {list(table.shape)}, the embeddings {weight.dtype} "
            f"{list(weight.shape)}): cannot verify that the table matches this model. Put the "
            f"original weights back, loaded with dtype={table.dtype}, or train the table again."
        )
    return saved


def _read(path: Path) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
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
    meta = {"places": {}} | meta
    check_json(meta, META, str(path))
    floats = table.ndim == 2 and table.is_floating_point() and bool(table.isfinite().all())
    if not floats or not 2 <= len(table) <= meta["levels"] or meta["passes"] < 1:
        raise FormatError(
            f"{path} holds {table.dtype} {list(table.shape)} for {meta['levels']} levels and "
            f"{meta['passes']} passes: expected 2 to as many rows as levels, all finite, and a "
            "pass. Put a whole copy of the file there, or train again."
        )
    return table, seen, meta


def _input_weight(model: PreTrainedModel, names: dict[str, str]) -> Tensor:
    """Return the weight of the embeddings that a table was trained with."""
    _, inputs = decoder_and_embeddings(model, **names)
    weight = inputs.weight
    assert isinstance(weight, Tensor)
    return weight
