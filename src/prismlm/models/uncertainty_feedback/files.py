"""Feedback put beside a model: its table drawn anew, or ``uncertainty_feedback.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.errors import FormatError, check_path, check_whole
from prismlm.files import atomic_file, json_text
from prismlm.layers.uncertainty_feedback import UncertaintyEmbedding
from prismlm.models.uncertainty_feedback.feedback import UncertaintyFeedback
from prismlm.models.uncertainty_feedback.place import check_model, decoder_and_embeddings, width_of
from prismlm.outputs import check_outputs

UNCERTAINTY_FILE = "uncertainty_feedback.safetensors"
FORMAT_VERSION = 1
TABLE = "embedding"
DAMAGED = "Put a whole copy of the file there, or train again."


def attach_uncertainty(
    model: PreTrainedModel,
    levels: int = 65536,
    *,
    rows: int | None = None,
    deviation: float | None = None,
    passes: int = 1,
    decoder: str | None = None,
    embeddings: str | None = None,
) -> UncertaintyFeedback:
    """Put uncertainty feedback beside a model, its table freshly drawn.

    The table has the dtype and device that the input embeddings have now, and N(0,
    initializer_range²), as in the source: move it with ``feedback.to(…)`` where the model is moved
    later.

    Args:
        model: a Hugging Face decoder, or encoder-decoder.
        levels: how many codes there are.
        rows: of the table; None for one a code, fewer to interpolate between them.
        deviation: of the table at the start in place of initializer_range; with 0 the model
            begins as it was without feedback.
        passes: see :class:`UncertaintyFeedback`.
        decoder: dotted name of the decoder, as in ``model.named_modules()``, for a model that does
            not say which of its modules that is. Saved and loaded with the table.
        embeddings: dotted name of its input embeddings, likewise.

    Raises:
        InputError: as :class:`UncertaintyFeedback`, levels that are no whole number from 2 on, or
            a deviation below 0.
    """
    check_model(model)
    _, inputs = decoder_and_embeddings(model, decoder=decoder, embeddings=embeddings)
    text: Any = model.config.get_text_config(decoder=True)
    spread = getattr(text, "initializer_range", 0.02) if deviation is None else deviation
    embedding = UncertaintyEmbedding(width_of(inputs), levels, rows=rows, deviation=spread)
    weight = next(inputs.parameters())
    return UncertaintyFeedback(
        model, embedding.to(weight), passes=passes, decoder=decoder, embeddings=embeddings
    )


def save_uncertainty(directory: Path | str, feedback: UncertaintyFeedback) -> None:
    """Write the table beside the checkpoint of the model that it stands in.

    The file is a safetensors file of one tensor, ``embedding`` [K, d], in the table's dtype; its
    metadata has the format's version, levels, passes, the fingerprint of the model's input
    embeddings, and their and the decoder's names if those were given.
    """
    path = check_path("the directory", directory) / UNCERTAINTY_FILE
    check_outputs(path, overwrite=True)
    table = feedback.embedding.weight.detach().cpu().contiguous()
    _, inputs = decoder_and_embeddings(feedback.model, **feedback.places)
    meta = {
        "format_version": FORMAT_VERSION,
        "levels": feedback.embedding.levels,
        "passes": feedback.passes,
        "model": fingerprint_of(inputs),
        "places": {part: name for part, name in feedback.places.items() if name is not None},
    }
    # One entry: safetensors writes several in another order each time.
    described = {"uncertainty_feedback": json_text(meta)}
    with atomic_file(path) as temporary:
        save_file({TABLE: table}, str(temporary), metadata=described)


def has_uncertainty(directory: Path | str) -> bool:
    """Say whether a directory holds a table of codes."""
    return (Path(directory) / UNCERTAINTY_FILE).is_file()


def load_uncertainty(
    directory: Path | str, model: PreTrainedModel, *, levels: int | None = None
) -> UncertaintyFeedback:
    """Put a saved table beside the model that it was trained with.

    Args:
        directory: of the checkpoint.
        model: what was loaded from it, in the dtype that it was saved in.
        levels: how many codes are expected; None for as many as there are.

    Raises:
        FormatError: the file is missing, damaged, of another version, of another number of levels,
            or of another model.
        InputError: the model has no decoder to put it beside, or feedback already.
    """
    path = check_path("the directory", directory) / UNCERTAINTY_FILE
    if not path.is_file():
        raise FormatError(
            f"{directory} has no {UNCERTAINTY_FILE}: train the model with uncertainty feedback, or "
            "attach a new table with prismlm.attach_uncertainty."
        )
    if levels is not None:
        levels = check_whole("the number of levels", levels, 2)
    table, meta = _read(path)
    _check_table(path, table, meta["levels"])
    if levels is not None and levels != meta["levels"]:
        raise FormatError(
            f"{path} has {meta['levels']} levels, and {levels} were expected: codes of one mean "
            "nothing to the other. Leave levels out to use the file's, or train again."
        )
    _, inputs = decoder_and_embeddings(model, **meta["places"])
    _check_belongs(path, table, model, inputs, meta)
    embedding = UncertaintyEmbedding(table.shape[1], meta["levels"], rows=len(table))
    with torch.no_grad():
        embedding.weight.copy_(table)
    beside = next(inputs.parameters())
    return UncertaintyFeedback(model, embedding.to(beside), passes=meta["passes"], **meta["places"])


def _check_table(path: Path, table: Tensor, levels: int) -> None:
    held = f"{table.dtype} {list(table.shape)}"
    if table.ndim != 2 or not table.is_floating_point():
        raise FormatError(f"{path} must hold a table [K, d] of floats, and has {held}. {DAMAGED}")
    if not bool(torch.isfinite(table).all()):
        raise FormatError(f"the table in {path} holds NaN or infinity. {DAMAGED}")
    if not 2 <= len(table) <= levels:
        raise FormatError(
            f"{path} has {len(table)} rows for {levels} levels: expected 2 to {levels}. {DAMAGED}"
        )


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


def _read(path: Path) -> tuple[Tensor, dict[str, Any]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            opened: Any = file
            meta = json.loads((opened.metadata() or {})["uncertainty_feedback"])
            table = opened.get_tensor(TABLE)
        version = meta["format_version"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error!r}. {DAMAGED}") from error
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version!r}; this prismlm reads {FORMAT_VERSION}. Use the "
            "prismlm that wrote it, or train again."
        )
    return table, _checked_meta(path, meta)


def _checked_meta(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Return what a file says of its table, complete and of the right kinds."""
    # Older files name no places.
    places = meta.get("places", {})
    wrong = [
        f"{name}: {meta.get(name)!r}"
        for name, least in (("levels", 2), ("passes", 1))
        if type(meta.get(name)) is not int or meta[name] < least
    ]
    if not isinstance(meta.get("model"), str):
        wrong.append(f"model: {meta.get('model')!r}")
    parts = {"decoder", "embeddings"}
    if not isinstance(places, dict) or not parts >= set(places):
        wrong.append(f"places: {places!r}")
    if wrong:
        raise FormatError(f"{path} says of its table what cannot be: {', '.join(wrong)}. {DAMAGED}")
    return meta | {"places": places}


def fingerprint_of(inputs: nn.Module) -> str:
    """Return the fingerprint of input embeddings."""
    weight: Any = inputs.weight
    return fingerprints.of_tensor(weight)
