"""Placing the prototypes on hidden states of the training text.

Prototypes drawn at random pull the representation together early, and it never recovers; placed
on states that the model already forms they cost next to nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.training.model import PrismForCausalLM

ROWS_PER_PASS = 8
# Few states of one row: states of one document resemble each other.
STATES_PER_ROW = 16


class Rows(Protocol):
    """Training rows as :class:`prismlm.corpus.packing.PackedDataset` gives them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


def place_prototypes(model: PrismForCausalLM, rows: Rows, generator: torch.Generator) -> None:
    """Set the prototypes to hidden states of random training positions, each z / (k τ).

    Raises:
        InputError: the rows have fewer positions than there are prototypes.
    """
    head = model.prototype_head
    states = sample_states(model.model, rows, head.num_prototypes, generator)
    head.place_on(states.to(head.prototypes.device))
    model.mark_placed()


@torch.no_grad()
def sample_states(
    model: Any, rows: Rows, count: int, generator: torch.Generator
) -> Float[Tensor, "count d"]:
    """Return the hidden states of ``count`` distinct positions drawn from random training rows.

    The model runs in evaluation mode; padding is never drawn, and torch's own generator is not
    used. At most :data:`STATES_PER_ROW` come from one row unless there are too few rows.

    Args:
        model: a Hugging Face causal language model.
        rows: the training rows.
        count: how many states.
        generator: decides the rows and the positions; on the CPU.

    Raises:
        InputError: there are fewer than ``count`` positions in all rows.
    """
    device = weight_of(model).device
    per_row = max(STATES_PER_ROW, -(-count // max(1, len(rows))))
    order = torch.randperm(len(rows), generator=generator).tolist()
    found, spare, missing = [], [], count
    training = model.training
    model.eval()
    try:
        for first in range(0, len(order), ROWS_PER_PASS):
            if missing <= 0:
                break
            batch = [rows[index] for index in order[first : first + ROWS_PER_PASS]]
            for states in _states(model, batch, device):
                shuffled = states[torch.randperm(len(states), generator=generator)]
                found.append(shuffled[:per_row])
                spare.append(shuffled[per_row:])
                missing -= len(found[-1])
    finally:
        model.train(training)
    # Short rows may leave the quota of the others too small.
    states = torch.cat(found + spare if missing > 0 else found)
    if len(states) < count:
        raise InputError(
            f"the training rows hold {len(states)} positions, and {count} prototypes are to be "
            "placed on different ones: use more text or set head.prototypes lower."
        )
    return states[:count]


def _states(model: Any, batch: list[dict[str, Tensor]], device: torch.device) -> list[Tensor]:
    """Return the float32 states of each row's tokens, on the CPU: [tokens, d] each."""
    input_ids = torch.stack([row["input_ids"] for row in batch]).to(device)
    position_ids = torch.stack([row["position_ids"] for row in batch]).to(device)
    with capture(model, logits=False) as seen:
        model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    z = seen.z.float().cpu()
    return [z[row][item["token_mask"]] for row, item in enumerate(batch)]
