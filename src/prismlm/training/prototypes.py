"""The prototypes of a head during training: their initialisation, and the scale of their losses."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from prismlm.corpus.packing import PackedDataset
from prismlm.errors import InputError
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import evaluating
from prismlm.training import parallel
from prismlm.training.model import PrismForCausalLM
from prismlm.training.recipe import Recipe

ROWS_PER_PASS = 8
# States of one document resemble each other, so that only a few of a row are used.
STATES_PER_ROW = 16
# More states per prototype hardly improve k-means.
STATES_PER_CLUSTER = 8
KMEANS_ITERATIONS = 10
# Cosines that k-means computes at a time.
TILE_ELEMENTS = 2**21


@torch.no_grad()
def spherical_kmeans(
    vectors: Float[Tensor, "N d"], centres: Float[Tensor, "K d"], iterations: int
) -> Float[Tensor, "K d"]:
    """Return the unit centres of spherical k-means, started from ``centres``.

        a_n = argmax_i cos(x_n, m_i)        m_i = Σ_{n: a_n = i} x̂_n / ‖Σ …‖

    An empty cluster moves its centre to the vector with the lowest cosine to its own centre, the
    next one to the vector with the second lowest. N ≥ K; vectors may have any norm.

    Source: Dhillon and Modha, Concept Decompositions, Machine Learning 42, 2001.
    """
    if not 1 <= len(centres) <= len(vectors):
        raise InputError(
            f"there are {len(vectors)} vectors for {len(centres)} centres: give at least as many."
        )
    unit, centres = F.normalize(vectors.float(), dim=-1), F.normalize(centres.float(), dim=-1)
    tiles = torch.split(unit, max(16, TILE_ELEMENTS // len(centres)))
    for _ in range(iterations):
        nearest = [(tile @ centres.T).max(1) for tile in tiles]
        cosines, assignment = (torch.cat(parts) for parts in zip(*nearest, strict=True))
        sums = torch.zeros_like(centres).index_add_(0, assignment, unit)
        empty = (torch.bincount(assignment, minlength=len(centres)) == 0).nonzero().squeeze(1)
        sums[empty] = unit[cosines.argsort(stable=True)[: len(empty)]]
        centres = F.normalize(sums, dim=-1)
    return centres


def cluster_centres(states: Float[Tensor, "N d"], count: int, iterations: int) -> Tensor:
    """Return K cluster centres of randomly ordered states, scaled to the states' mean norm."""
    return spherical_kmeans(states, states[:count], iterations) * states.norm(dim=-1).mean()


def initialise_prototypes(
    model: PrismForCausalLM,
    rows: PackedDataset,
    generator: torch.Generator,
    method: Literal["states", "kmeans", "random"] = "states",
) -> None:
    """Initialise the prototypes, and let the head take part in training from now on.

    With ``states`` each is the hidden state of a random training position, as z / (k τ); with
    ``kmeans`` a cluster centre of such states; with ``random`` prototypes stay random.
    """
    head = model.prototype_head
    count = head.num_prototypes
    if method != "random":
        wanted = count * (STATES_PER_CLUSTER if method == "kmeans" else 1)
        states = sample_states(model.model, rows, wanted, generator, at_least=count)
        if method == "kmeans":
            states = cluster_centres(states, count, KMEANS_ITERATIONS)
        head.place_on(states.to(head.prototypes.device))
    model.initialised = True


@torch.no_grad()
def sample_states(
    model: Any,
    rows: PackedDataset,
    count: int,
    generator: torch.Generator,
    *,
    at_least: int | None = None,
) -> Float[Tensor, "count d"]:
    """Return the hidden states of ``count`` distinct positions of random training rows, no padding.

    If there are enough rows, few states come from each. Raises InputError if there are fewer
    positions than ``at_least``, by default ``count``.
    """
    minimum = count if at_least is None else at_least
    per_row = max(STATES_PER_ROW * -(-count // minimum), -(-count // max(1, len(rows))))
    order = torch.randperm(len(rows), generator=generator).tolist()
    chosen, spare, missing = [], [], count
    with evaluating(model):
        for first in range(0, len(order), ROWS_PER_PASS):
            if missing <= 0:
                break
            batch = [rows[index] for index in order[first : first + ROWS_PER_PASS]]
            for states in _row_states(model, batch):
                shuffled = states[torch.randperm(len(states), generator=generator)]
                chosen.append(shuffled[:per_row])
                spare.append(shuffled[per_row:])
                missing -= len(chosen[-1])
    states = torch.cat(chosen + spare if missing > 0 else chosen)
    if len(states) < minimum:
        raise InputError(
            f"the training rows have {len(states)} positions, fewer than the {minimum} prototypes "
            "to initialise from them: use more text, or lower head.prototypes."
        )
    return states[:count]


def _row_states(model: Any, batch: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the states of each row without padding, float32 on the CPU: [tokens, d] each."""
    device, names = weight_of(model).device, ("input_ids", "position_ids")
    inputs = {name: torch.stack([row[name] for row in batch]).to(device) for name in names}
    with capture(model, logits=False) as captured:
        model(**inputs, use_cache=False)
    z = captured.z.float().cpu()
    return [z[number][row["token_mask"]] for number, row in enumerate(batch)]


class HeadSchedule(TrainerCallback):
    """Initialises the prototypes before step t₀, then scales their losses.

    s(t) = min(1, (t − t₀) / (warmup · steps − t₀))
    """

    def __init__(self, rows: PackedDataset, recipe: Recipe) -> None:
        self.rows, self.recipe = rows, recipe

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Initialise the prototypes if it is time; set the loss scale of the step."""
        model: PrismForCausalLM = kwargs["model"]
        step, start = state.global_step, self.recipe.initialisation_step
        if step >= start and not model.initialised:
            generator = torch.Generator().manual_seed(self.recipe.seed)
            initialise_prototypes(model, self.rows, generator, self.recipe.head.initialise)
            parallel.broadcast_parameters(model.prototype_head)
        rising = self.recipe.losses.warmup * state.max_steps - start
        model.loss_scale = min(1.0, max(0, step - start) / rising) if rising > 0 else 1.0
        model.step = step
