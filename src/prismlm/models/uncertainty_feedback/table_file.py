"""The file of a table of uncertainty codes, ``uncertainty_feedback.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.errors import FormatError, check_path
from prismlm.files import atomic_file, json_text
from prismlm.models.uncertainty_feedback.place import decoder_and_embeddings, width_of
from prismlm.outputs import check_outputs

UNCERTAINTY_FILE = "uncertainty_feedback.safetensors"
FORMAT_VERSION = 1
DAMAGED = "Put a whole copy of the file there, or train again."


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
    names: dict[str, str | None]


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
    _, inputs = decoder_and_embeddings(model, **saved.names)
    meta = {
        "format_version": FORMAT_VERSION,
        "levels": saved.levels,
        "passes": saved.passes,
        "model": fingerprint_of(inputs),
        "places": {part: name for part, name in saved.names.items() if name is not None},
    }
    tensors = {"embedding": saved.table, "seen": saved.seen}
    held = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
    # One entry: safetensors writes several in another order each time.
    described = {"uncertainty_feedback": json_text(meta)}
    with atomic_file(path) as temporary:
        save_file(held, str(temporary), metadata=described)


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
    _check_table(path, table, meta["levels"])
    if levels is not None and levels != meta["levels"]:
        raise FormatError(
            f"{path} has {meta['levels']} levels, and {levels} were expected: codes of one mean "
            "nothing to the other. Leave levels out to use the file's, or train again."
        )
    _, inputs = decoder_and_embeddings(model, **meta["places"])
    _check_belongs(path, table, model, inputs, meta)
    return SavedTable(table, seen, meta["levels"], meta["passes"], meta["places"])


def _check_table(path: Path, table: Tensor, levels: int) -> None:
    wrong = ""
    if table.ndim != 2 or not table.is_floating_point():
        wrong = f"must hold a table [K, d] of floats, and has {table.dtype} {list(table.shape)}"
    elif not bool(torch.isfinite(table).all()):
        wrong = "holds NaN or infinity"
    elif not 2 <= len(table) <= levels:
        wrong = f"has {len(table)} rows for {levels} levels: expected 2 to {levels}"
    if wrong:
        raise FormatError(f"{path} {wrong}. {DAMAGED}")


def _check_belongs(
    path: Path, table: Tensor, model: PreTrainedModel, inputs: nn.Module, meta: dict[str, Any]
) -> None:
    if table.shape[1] != width_of(inputs):
        raise FormatError(
            f"the vectors in {path} are {table.shape[1]} wide, and the input embeddings of "
            f"{type(model).__name__} {width_of(inputs)}: they do not belong together."
        )
    if meta["model"] == fingerprint_of(inputs):
        return
    dtype = next(inputs.parameters()).dtype
    if dtype != table.dtype:
        raise FormatError(
            f"{path} was saved with a model in {table.dtype} and this one is in {dtype}: "
            f"cannot verify that the table matches this model. Load the model with "
            f"dtype={table.dtype}, and convert model and feedback with .to() afterwards."
        )
    raise FormatError(
        f"the input embeddings of the model are not those that {path} was trained with. Put "
        "the original weights back, or train the table again."
    )


def _read(path: Path) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            opened: Any = file
            meta = json.loads((opened.metadata() or {})["uncertainty_feedback"])
            table = opened.get_tensor("embedding")
            seen = opened.get_tensor("seen") if "seen" in opened.keys() else None  # noqa: SIM118
        version = meta["format_version"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error!r}. {DAMAGED}") from error
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version!r}; this prismlm reads {FORMAT_VERSION}. Use the "
            "prismlm that wrote it, or train again."
        )
    return table, seen, _checked_meta(path, meta)


def _checked_meta(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Return what a file says of its table, complete and of the right kinds."""
    # Older files name no places.
    places = meta.get("places", {})
    levels, passes, model = (meta.get(name) for name in ("levels", "passes", "model"))
    right = {
        f"levels: {levels!r}": type(levels) is int and levels >= 2,
        f"passes: {passes!r}": type(passes) is int and passes >= 1,
        f"model: {model!r}": isinstance(model, str),
        f"places: {places!r}": isinstance(places, dict) and {*places} <= {"decoder", "embeddings"},
    }
    if wrong := [said for said, fits in right.items() if not fits]:
        raise FormatError(f"{path} says of its table what cannot be: {', '.join(wrong)}. {DAMAGED}")
    return meta | {"places": places}


def fingerprint_of(inputs: nn.Module) -> str:
    """Return the fingerprint of input embeddings."""
    weight: Any = inputs.weight
    return fingerprints.of_tensor(weight)
