"""Checkpoints: model directories with the state of training beside them.

A checkpoint is written under a hidden name and renamed when it is complete, and renamed again
before it is deleted: whatever bears the name ``checkpoint-N`` can be resumed from.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from prismlm.errors import DivergenceError, FormatError, InputError
from prismlm.files import discard, room_to_write, temporary_sibling
from prismlm.training import parallel

if TYPE_CHECKING:
    from prismlm.training.model import PrismForCausalLM

STATE_FILE = "prismlm_training_state.pt"
# Of one parameter: its float32 weight and AdamW's two moments.
BYTES_PER_PARAMETER = 12
# What torch, safetensors and transformers raise of files that are cut short or hold other bytes.
_DAMAGED = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
_NAME = re.compile(r"checkpoint-(\d+)")


def save_state(
    directory: Path,
    model: PrismForCausalLM,
    meter: dict[str, Any],
    uses: Tensor | None,
    norms: list[float] | None = None,
) -> None:
    """Write what a model directory lacks to go on training from it, bit for bit.

    Args:
        directory: the checkpoint.
        model: the model with its head.
        meter: running averages of the losses.
        uses: of each prototype since the last revival, if any are revived.
        norms: of the gradients of the blocks at the last evaluation, if they are logged.
    """
    state = {
        "uses": uses,
        "head": model.prototype_head.state_dict(),
        "head_placed": model.placed,
        "meter": meter,
        "gradient_norms": norms,
    }
    torch.save(state, directory / STATE_FILE)


def load_state(
    directory: Path, model: PrismForCausalLM
) -> tuple[dict[str, Any], list[float] | None]:
    """Put a checkpoint's weights into ``model``; return the running averages and norms with it.

    Raises:
        FormatError: the checkpoint cannot be read or is of another model.
    """
    with guard_reading(directory):
        state = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)
        meter, placed, uses = state["meter"], state["head_placed"], state.get("uses")
        norms = state.get("gradient_norms")
        backbone: PreTrainedModel = type(model.model).from_pretrained(
            directory, dtype=model.model.dtype, local_files_only=True
        )
        model.model.load_state_dict(backbone.state_dict())
        model.prototype_head.load_state_dict(state["head"])
    model.mark_placed(placed)
    if model.usage is not None and uses is not None:
        model.usage.load(uses)
    return meter, norms


def as_of_one_run(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as one process that never stopped has it: a ``state_dict`` hook.

    Shards are gathered, for which every process has to call. Equal names are one string: pickle
    writes one again where another is equal but not the same, and those of a state that was read are
    not those of one that torch makes later, such as the head's. The file of a run that was resumed
    before then would differ from the straight run's.
    """
    state = {
        parameter: {sys.intern(name): parallel.full(value) for name, value in values.items()}
        for parameter, values in saved["state"].items()
    }
    return saved | {"state": state}


def load_optimizer(
    directory: Path, optimizer: torch.optim.Optimizer, scheduler: LRScheduler
) -> None:
    """Read the state of a sharded model's optimizer; every process takes its shards."""
    whole, schedule = (
        torch.load(directory / name, map_location="cpu", weights_only=True)
        for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
    )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {name: parallel.like(parameters[index], v) for name, v in values.items()}
        for index, values in whole["state"].items()
    }
    optimizer.load_state_dict(whole | {"state": state})
    scheduler.load_state_dict(schedule)


@contextmanager
def guard_reading(checkpoint: Path) -> Iterator[None]:
    """Turn what damaged files raise into an error that says how to go on.

    Raises:
        FormatError: the checkpoint cannot be read in the block.
    """
    try:
        yield
    except InputError:
        # A ValueError too, but of what was asked for.
        raise
    except (FormatError, *_DAMAGED) as error:
        raise FormatError(
            f"the checkpoint {checkpoint} cannot be resumed from "
            f"({str(error) or type(error).__name__}). Delete it, and training resumes from the one "
            "before."
        ) from error


def open_state(checkpoint: Path) -> None:
    """Open what Trainer reads of a checkpoint, but for the numbers of its tensors.

    Within :func:`guard_reading`, so that a damaged file is told before anything is built.
    """
    TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME):
        torch.load(checkpoint / name, map_location="cpu", mmap=True, weights_only=True)
    # Their types are those of other packages, which torch.load asks to be named.
    for file in checkpoint.glob("rng_state*.pth"):
        zipfile.ZipFile(file).close()


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step that a checkpoint was written after."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else -1


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if step_of(path) >= 0), key=step_of)


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    found = list_checkpoints(directory)
    return found[-1] if found else None


@contextmanager
def staging(directory: Path, needed: int) -> Iterator[Path]:
    """Yield a hidden directory; on success move the checkpoints in it to ``directory``.

    Args:
        directory: where the checkpoints of the run are.
        needed: bytes that a checkpoint takes.

    Raises:
        PrismError: there is no room, or writing failed; the checkpoints before are as they were.
    """
    hidden = temporary_sibling(directory / "checkpoint")
    try:
        with guard_writing(f"a checkpoint in {directory}", directory, needed):
            hidden.mkdir(parents=True)
            yield hidden
            for checkpoint in list_checkpoints(hidden):
                target = directory / checkpoint.name
                if target.exists():
                    discard(target)
                os.rename(checkpoint, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def guard_writing(what: str, directory: Path, needed: float = 0) -> AbstractContextManager[None]:
    """Turn a disk that is full, or fails, into an error that says what is left to go on from.

    Args:
        what: the block writes, and where.
        directory: where the checkpoints of the run are, on the same disk.
        needed: bytes that it takes.

    Raises:
        PrismError: as of :func:`prismlm.files.room_to_write`.
    """
    way_out = "Make room, then resume with --resume."
    return room_to_write(what, directory, lambda: f"{last_good(directory)} {way_out}", needed)


def last_good(directory: Path) -> str:
    """Say in a sentence which checkpoint of a run is the newest that is whole."""
    newest = latest_checkpoint(directory)
    if newest is None:
        return "No checkpoint was written before."
    return f"The last good checkpoint is {newest} (step {step_of(newest)})."


def keep_newest(directory: Path, count: int) -> None:
    """Delete all but the newest ``count`` checkpoints."""
    for checkpoint in list_checkpoints(directory)[:-count]:
        discard(checkpoint)


def check_weights_finite(model: PrismForCausalLM, step: int, directory: Path) -> None:
    """Check every weight, so that no checkpoint holds what training cannot go on from.

    Raises:
        DivergenceError: a weight is infinite or not a number.
    """
    name = not_finite(model)
    if name is not None:
        raise DivergenceError(
            f"the weight {name} is not finite after step {step}, so nothing is written of it. "
            f"{last_good(directory)}"
        )


def not_finite(model: PrismForCausalLM) -> str | None:
    """Return the name of the first weight of which this process has an infinity or no number."""
    parameters = ((name, parallel.local(p)) for name, p in model.named_parameters())
    return next((name for name, p in parameters if not torch.isfinite(p).all()), None)
