"""The prototypes of a head over a run: placed on hidden states, brought in slowly, revived.

Prototypes drawn at random pull the representation together early, and it never recovers; placed
on states that the model already forms they cost next to nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from prismlm.corpus.packing import PackedDataset
from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import evaluating
from prismlm.training import parallel
from prismlm.training.model import PrismForCausalLM, Usage
from prismlm.training.recipe import Recipe

ROWS_PER_PASS = 8
# Few states of one row: states of one document resemble each other.
STATES_PER_ROW = 16
# More states than this for each prototype place them hardly better.
STATES_PER_CLUSTER = 8
KMEANS_ITERATIONS = 10
# Cosines that k-means forms at a time.
TILE_ELEMENTS = 2**21


@torch.no_grad()
def spherical_kmeans(
    vectors: Float[Tensor, "N d"], centres: Float[Tensor, "K d"], iterations: int
) -> Float[Tensor, "K d"]:
    """Move centres to the mean directions of the vectors nearest to them; return unit vectors.

        a_n = argmax_i cos(x_n, m_i)        m_i = Σ_{n: a_n = i} x̂_n / ‖Σ …‖

    A centre that no vector is nearest to moves onto the vector with the lowest cosine to its own
    centre, the next such centre onto the next such vector. The mean cosine never falls while no
    centre is empty. Vectors, N ≥ K, may have any norm; ``centres`` is where to start.

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
    """Return K centres of clusters of states in random order, with the states' mean norm."""
    return spherical_kmeans(states, states[:count], iterations) * states.norm(dim=-1).mean()


def place_prototypes(
    model: PrismForCausalLM,
    rows: PackedDataset,
    generator: torch.Generator,
    method: Literal["states", "kmeans", "random"] = "states",
) -> None:
    """Set the prototypes, and let the head take part from now on.

    ``states`` puts each on the hidden state of a random training position, as z / (k τ);
    ``kmeans`` on the centre of a cluster of such states (spherical k-means, with their mean norm);
    ``random`` leaves them as they were drawn.
    """
    head = model.prototype_head
    count = head.num_prototypes
    if method != "random":
        wanted = count * (STATES_PER_CLUSTER if method == "kmeans" else 1)
        states = sample_states(model.model, rows, wanted, generator, at_least=count)
        if method == "kmeans":
            states = cluster_centres(states, count, KMEANS_ITERATIONS)
        head.place_on(states.to(head.prototypes.device))
    model.placed = True


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
    """
    enough = count if at_least is None else at_least
    per_row = max(STATES_PER_ROW * -(-count // enough), -(-count // max(1, len(rows))))
    order = torch.randperm(len(rows), generator=generator).tolist()
    taken, spare, missing = [], [], count
    with evaluating(model):
        for first in range(0, len(order), ROWS_PER_PASS):
            if missing <= 0:
                break
            batch = [rows[index] for index in order[first : first + ROWS_PER_PASS]]
            for states in _states(model, batch):
                shuffled = states[torch.randperm(len(states), generator=generator)]
                taken.append(shuffled[:per_row])
                spare.append(shuffled[per_row:])
                missing -= len(taken[-1])
    # Short rows may leave the quota of the others too small.
    states = torch.cat(taken + spare if missing > 0 else taken)
    if len(states) < enough:
        raise InputError(
            f"the training rows hold {len(states)} positions, and {enough} prototypes are to be "
            "placed on different ones: use more text or set head.prototypes lower."
        )
    return states[:count]


def _states(model: Any, batch: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the float32 states of each row's tokens, on the CPU: [tokens, d] each."""
    device, names = weight_of(model).device, ("input_ids", "position_ids")
    given = {name: torch.stack([row[name] for row in batch]).to(device) for name in names}
    with capture(model, logits=False) as seen:
        model(**given, use_cache=False)
    z = seen.z.float().cpu()
    return [z[row][item["token_mask"]] for row, item in enumerate(batch)]


class HeadSchedule(TrainerCallback):
    """Places the prototypes before a step, raises the weights of their losses and anneals k.

    s(t) = min(1, (t − placed) / (full − placed)),          full = warmup · steps
    k(t) = max(k, round(k₀ − (k₀ − k) (t − placed) / (last − placed))),   last = anneal_until
    """

    def __init__(self, rows: PackedDataset, recipe: Recipe) -> None:
        self.rows, self.recipe = rows, recipe

    def loss_scale(self, step: int, steps: int) -> float:
        """Return the factor of the head's losses in the step after ``step`` steps."""
        return progress(step, self.recipe.placing_step, self.recipe.losses.warmup * steps)

    def prototypes_per_token(self, step: int, steps: int) -> int:
        """Return k in the step after ``step`` steps."""
        head = self.recipe.head
        final = head.prototypes_per_token
        first = head.anneal_from or final
        done = progress(step, self.recipe.placing_step, head.anneal_until * steps)
        return round(first + (final - first) * done)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Place the prototypes when it is time; set the factor, k and the step."""
        model: PrismForCausalLM = kwargs["model"]
        step, steps = state.global_step, state.max_steps
        if step >= self.recipe.placing_step and not model.placed:
            generator = torch.Generator().manual_seed(self.recipe.seed)
            place_prototypes(model, self.rows, generator, self.recipe.head.initialise)
            parallel.broadcast_parameters(model.prototype_head)
        model.loss_scale = self.loss_scale(step, steps)
        model.prototypes_per_token = self.prototypes_per_token(step, steps)
        model.step = step


def progress(step: int, first: int, last: float) -> float:
    """Return how far ``step`` is on the way from ``first`` to ``last``, in [0, 1]."""
    return 1.0 if last <= first else min(1.0, max(0.0, (step - first) / (last - first)))


@torch.no_grad()
def revive(
    head: PrototypeHead,
    usage: Usage,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> int:
    """Put unused prototypes onto random ones of the worst states; return how many.

    A revived prototype has the direction of its state and the median norm of those in use; its
    second moments are the mean of theirs, so that its first step is no larger.
    """
    in_use, worst = usage.counts > 0, usage.worst
    if worst is None or in_use.all() or not in_use.any():
        return 0
    unused = (~in_use).nonzero().squeeze(1)
    chosen = torch.randperm(len(worst), generator=generator)[: len(unused)].to(worst.device)
    unused = unused[: len(chosen)]
    prototypes = head.prototypes
    norm = prototypes[in_use].norm(dim=-1).median()
    prototypes[unused] = (F.normalize(worst[chosen], dim=-1) * norm).to(prototypes.dtype)
    moments = optimizer.state.get(prototypes, {})
    if "exp_avg" in moments:
        moments["exp_avg"][unused] = 0
        moments["exp_avg_sq"][unused] = moments["exp_avg_sq"][in_use].mean(0)
    return len(unused)


class ReviveUnused(TrainerCallback):
    """Revives, every ``head.revive_every`` steps, the prototypes that none of these used.

    None after ``head.revive_until``: they would not have time to learn. The recipe's seed decides
    which states; the generator is the head's own.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Revive if it is time."""
        model, optimizer, recipe = kwargs["model"], kwargs["optimizer"], self.recipe
        step, until = state.global_step, round(recipe.head.revive_until * recipe.steps)
        since = step - recipe.placing_step
        if since <= 0 or since % recipe.head.revive_every or step > until:
            return
        generator = torch.Generator().manual_seed(recipe.seed + step)
        model.usage.merge()
        own = getattr(optimizer, "optimizer", optimizer)
        revive(model.prototype_head, model.usage, own, generator)
        model.usage.reset()
