"""Placing the prototypes on hidden states of the training text.

Prototypes drawn at random pull the representation together early, and it never recovers; placed
on states that the model already forms they cost next to nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.corpus.packing import PackedDataset
from prismlm.errors import InputError
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.ops.spherical_kmeans import spherical_kmeans
from prismlm.training.model import PrismForCausalLM

ROWS_PER_PASS = 8
# Few states of one row: states of one document resemble each other.
STATES_PER_ROW = 16
# What k-means clusters: more states than this for each prototype place them hardly better.
STATES_PER_CLUSTER = 8
KMEANS_ITERATIONS = 10


def place_prototypes(
    model: PrismForCausalLM,
    rows: PackedDataset,
    generator: torch.Generator,
    method: Literal["states", "kmeans", "random"] = "states",
) -> None:
    """Set the prototypes, and let the head take part from now on.

    Args:
        model: the model with its head.
        rows: the training rows.
        generator: decides everything random; on the CPU.
        method: ``states`` puts each on the hidden state of a random training position, as
            z / (k τ); ``kmeans`` on the centre of a cluster of such states (spherical k-means,
            with the mean norm of the states); ``random`` leaves them as they were drawn.

    Raises:
        InputError: the rows have fewer positions than there are prototypes.
    """
    head = model.prototype_head
    if method != "random":
        count = head.num_prototypes
        if method == "kmeans":
            wanted = STATES_PER_CLUSTER * count
            states = sample_states(model.model, rows, wanted, generator, at_least=count)
            # The states are in random order already.
            found = spherical_kmeans(states, states[:count], KMEANS_ITERATIONS)
            states = found.centres * states.norm(dim=-1).mean()
        else:
            states = sample_states(model.model, rows, count, generator)
        head.place_on(states.to(head.prototypes.device))
    model.mark_placed()


@torch.no_grad()
def sample_states(
    model: Any,
    rows: PackedDataset,
    count: int,
    generator: torch.Generator,
    *,
    at_least: int | None = None,
) -> Float[Tensor, "count d"]:
    """Return the hidden states of ``count`` distinct positions drawn from random training rows.

    The model runs in evaluation mode; padding is never drawn, and torch's own generator is not
    used. At most :data:`STATES_PER_ROW` come from one row unless there are too few rows, or more
    states than prototypes are wanted.

    Args:
        model: a Hugging Face causal language model.
        rows: the training rows.
        count: how many states.
        generator: decides the rows and the positions; on the CPU.
        at_least: how many are enough if the rows hold no more; ``count`` if not given.

    Raises:
        InputError: there are fewer than ``at_least`` positions in all rows.
    """
    device = weight_of(model).device
    enough = count if at_least is None else at_least
    quota = STATES_PER_ROW * -(-count // enough)
    per_row = max(quota, -(-count // max(1, len(rows))))
    order = torch.randperm(len(rows), generator=generator).tolist()
    found, spare, missing = [], [], count
    with evaluating(model):
        for first in range(0, len(order), ROWS_PER_PASS):
            if missing <= 0:
                break
            batch = [rows[index] for index in order[first : first + ROWS_PER_PASS]]
            for states in _states(model, batch, device):
                shuffled = states[torch.randperm(len(states), generator=generator)]
                found.append(shuffled[:per_row])
                spare.append(shuffled[per_row:])
                missing -= len(found[-1])
    # Short rows may leave the quota of the others too small.
    states = torch.cat(found + spare if missing > 0 else found)
    if len(states) < enough:
        raise InputError(
            f"the training rows hold {len(states)} positions, and {enough} prototypes are to be "
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
