"""Checkpoints: model directories with the state of training beside them."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from prismlm.errors import DivergenceError, FormatError
from prismlm.files import room_to_write
from prismlm.training import parallel
from prismlm.training.model import PrismForCausalLM

CHECKPOINTS = "checkpoints"
STATE_FILE = "prismlm_training_state.pt"
# Trainer writes it last: a directory that has it is complete.
TRAINER_STATE_FILE = "trainer_state.json"
# Bytes per parameter: its float32 weight and AdamW's two moments.
BYTES_PER_PARAMETER = 12


def save_state(directory: Path, model: PrismForCausalLM, tokens: int) -> None:
    """Write what a model directory lacks to resume training from it; every process has to call."""
    usage = None if model.usage is None else model.usage.state()
    state = {
        "uses": usage,
        "head": model.prototype_head.state_dict(),
        "head_placed": model.placed,
        "tokens": tokens,
    }
    if parallel.is_main():
        torch.save(state, directory / STATE_FILE)


def load_state(directory: Path, model: PrismForCausalLM) -> int:
    """Put a checkpoint's weights into ``model``; return the tokens it was trained on."""
    try:
        state = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)
        decoder: PreTrainedModel = type(model.model).from_pretrained(
            directory, dtype=model.model.dtype, local_files_only=True
        )
        model.model.load_state_dict(decoder.state_dict())
        model.prototype_head.load_state_dict(state["head"])
        model.placed = state["head_placed"]
        if model.usage is not None and state["uses"] is not None:
            model.usage.load(state["uses"])
        return state["tokens"]
    except Exception as error:  # torch, safetensors and transformers raise what they like
        raise FormatError(
            f"the checkpoint {directory} cannot be resumed from "
            f"({str(error) or type(error).__name__}). Delete it, and training resumes from the one "
            "before."
        ) from error


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step that a checkpoint was written after; −1 for another name."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match.group(1)) if match else -1


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    complete = [path.parent for path in directory.glob(f"checkpoint-*/{TRAINER_STATE_FILE}")]
    return sorted((path for path in complete if step_of(path) >= 0), key=step_of)


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    return next(reversed(list_checkpoints(directory)), None)


def last_good(directory: Path) -> str:
    """Say in a sentence which checkpoint of a run is the newest that is whole."""
    newest = latest_checkpoint(directory)
    if newest is None:
        return "No checkpoint was written before."
    return f"The last good checkpoint is {newest} (step {step_of(newest)})."


def guard_writing(what: str, directory: Path, needed: float = 0) -> AbstractContextManager[None]:
    """Turn a disk that is full, or fails, into an error that says what is left to resume from."""
    way_out = "Make room, then resume with --resume."
    return room_to_write(what, directory, lambda: f"{last_good(directory)} {way_out}", needed)


def check_weights_finite(model: nn.Module, step: int, directory: Path) -> None:
    """Check every weight, so that no checkpoint holds what training cannot resume from."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parallel.local(parameter)).all():
            raise DivergenceError(
                f"the weight {name} is not finite after step {step}, so nothing is written of it. "
                f"{last_good(directory)}"
            )
