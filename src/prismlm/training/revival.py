"""Bringing unused prototypes back: onto states that the others explain poorly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.layers import PrototypeHead
from prismlm.layers.prototype_head import HeadOutput
from prismlm.training import distributed
from prismlm.training.recipe import Recipe

# Candidates are drawn from the worst quarter of a forward pass's states: the very worst alone
# would often be one another's neighbours.
WORST = 0.25


class Usage:
    """Counts how often each prototype is used, and keeps the last states explained worst.

    Attributes:
        counts: uses of each prototype since the last :meth:`reset`, int64 [K].
        worst: states of the last forward pass by ‖z − ẑ‖² descending, [M, d]; after
            :meth:`merge` those of one process after another.
    """

    def __init__(self, num_prototypes: int) -> None:
        self.counts = torch.zeros(num_prototypes, dtype=torch.int64)
        self.worst: Tensor | None = None

    @torch.no_grad()
    def add(self, output: HeadOutput, z: Tensor, mask: Tensor | None) -> None:
        """Take in one forward pass; padding counts for nothing."""
        routing, z = output.routing, z.float()
        used = routing.activations > 0
        error = (z - output.reconstruction).square().sum(-1)
        if mask is not None:
            used, error, z = used & mask[:, None], error[mask], z[mask]
        counts = torch.bincount(routing.indices[used], minlength=len(self.counts))
        self.counts = self.counts.to(counts.device) + counts
        self.worst = z[error.topk(round(WORST * len(z))).indices]

    def merge(self) -> None:
        """Take in the other processes' counts and states: all of them then revive the same."""
        self.counts = distributed.sum_over_processes(self.counts)
        if self.worst is not None:
            self.worst = distributed.concatenate(self.worst)

    def state(self) -> Tensor:
        """Return the counts of all processes together; every process has to call."""
        return distributed.sum_over_processes(self.counts).cpu()

    def load(self, counts: Tensor) -> None:
        """Go on from saved counts, which the first process takes over for all."""
        self.counts = counts if distributed.is_main() else torch.zeros_like(counts)

    def reset(self) -> None:
        """Start counting again."""
        self.counts = torch.zeros_like(self.counts)
        self.worst = None


@torch.no_grad()
def revive(
    head: PrototypeHead,
    usage: Usage,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> int:
    """Put unused prototypes onto random ones of the worst states; return how many.

    A revived prototype has the direction of its state and the median norm of those in use. Its
    moments in the optimizer start anew: none for the direction, the mean of the used for the size,
    so that its first step is no larger than theirs. With fewer states than unused prototypes, the
    rest wait.
    """
    unused = (usage.counts == 0).nonzero().squeeze(1)
    worst = usage.worst
    if worst is None or not len(unused) or not len(worst) or len(unused) == len(usage.counts):
        return 0
    chosen = torch.randperm(len(worst), generator=generator)[: len(unused)].to(worst.device)
    unused = unused[: len(chosen)]
    states = worst[chosen]
    prototypes, in_use = head.prototypes, usage.counts > 0
    norm = prototypes[in_use].norm(dim=-1).median()
    norms = states.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    prototypes[unused] = (states / norms * norm).to(prototypes.dtype)
    moments = optimizer.state.get(prototypes, {})
    if "exp_avg" in moments:
        moments["exp_avg"][unused] = 0
        moments["exp_avg_sq"][unused] = moments["exp_avg_sq"][in_use].mean(0)
    return len(unused)


@dataclass(eq=False)
class ReviveUnused(TrainerCallback):
    """Revives, every ``head.revive_every`` steps, the prototypes that none of these used.

    None after ``head.revive_until``: they would not have time to learn. The recipe's seed decides
    which states; the generator is the head's own.
    """

    recipe: Recipe

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Revive if it is time."""
        model, step, recipe = kwargs["model"], state.global_step, self.recipe
        since, until = step - recipe.placing_step, round(recipe.head.revive_until * recipe.steps)
        if since <= 0 or since % recipe.head.revive_every or step > until:
            return
        generator = torch.Generator().manual_seed(recipe.seed + step)
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)
        model.usage.merge()
        revive(model.prototype_head, model.usage, optimizer, generator)
        model.usage.reset()
