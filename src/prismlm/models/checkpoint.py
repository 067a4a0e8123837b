"""Opening a Hugging Face checkpoint from a directory, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

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
from prismlm.models.uncertainty import has_uncertainty, load_uncertainty


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
