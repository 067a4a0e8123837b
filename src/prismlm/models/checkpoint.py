"""Opening a Hugging Face checkpoint from a directory, whoever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from prismlm.errors import FormatError, InputError
from prismlm.models.quiet import quiet_transformers
from prismlm.models.seam import verify_logit_map
from prismlm.models.sidecar import Sidecar, has_sidecar, load_sidecar
from prismlm.models.uncertainty_feedback import has_uncertainty, load_uncertainty


def read_checkpoint(
    path: Path | str, *, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a checkpoint with its tokenizer, with or without a prototype head beside it.

    Uncertainty feedback that was saved with it stands in it again.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        InputError: no such directory.
        FormatError: what is in it is no checkpoint, or damaged.
        InputError: it has a table of codes and is no model that can use one.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(
            f"{directory} is not a directory. Expected a model directory; `prismlm demo` makes one."
        )
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
            tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, SafetensorError) as error:
        raise FormatError(f"the checkpoint in {directory} cannot be read: {error}") from error
    model.to(torch.device(device)).eval()  # pyright: ignore[reportArgumentType]
    if has_uncertainty(directory):
        load_uncertainty(directory, model)
    return model, tokenizer


class Checkpoint(NamedTuple):
    """A model directory opened without a lens: what an index is built from.

    Attributes:
        model: the plain Hugging Face model, in evaluation mode.
        tokenizer: its tokenizer.
        sidecar: its head, logit map and provenance.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sidecar: Sidecar


def load_checkpoint(path: Path | str, *, device: str = "cpu") -> Checkpoint:
    """Open a model directory with its head, whatever state its lenses are in.

    Raises:
        InputError: no such directory.
        FormatError: no head, a damaged file, or files that do not belong together.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(
            f"{directory} is not a directory. Expected a model directory; `prismlm demo` makes one."
        )
    if not has_sidecar(directory):
        load_sidecar(directory)  # raises, saying what is missing
    model, tokenizer = read_checkpoint(directory, device=device)
    sidecar = load_sidecar(directory, model)
    verify_logit_map(model, sidecar.logit_map)
    sidecar.head.to(device)
    return Checkpoint(model, tokenizer, sidecar)
