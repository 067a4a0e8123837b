"""One optimizer step, however its rows are split into processes and micro-batches.

The gradient of a step is that of the loss over all of the step's tokens. Each forward pass
therefore contributes its share: the shares of all micro-batches in all processes add up to the
step's losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.layers import PrototypeHead
from prismlm.ops.prototype_head import Routing
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.training import distributed
from prismlm.training.objective import NO_LABEL, States, following

# What a part of the head's loss is a mean over. R1 has an extremum instead, and its own way.
MEAN_OVER = {
    "point_pull": "tokens",
    "residual": "tokens",
    "prototype_only_ce": "labels",
    "prototype_only_kl": "labels",
    "diversity": "passes",
}
NONE_FOUND = -2.0


class OptimizerStep:
    """How much there is in one optimizer step, and the states nearest to each prototype so far.

        CE, R2, RES:  Σ over the step's tokens / their number in the whole step
        DIV:          once, in equal shares
        R1:           −(1/K) Σ_i max_j c_ij over the step's tokens j

    R1 keeps, over the micro-batches of one process, the best cosine and state of every prototype
    ([K] and [K, d]; never N×K) and is computed at the last one; of several processes the one with
    the best cosine contributes, the lower rank if two have it. Prototypes thus get the exact
    gradient. So do the states, if the step is one forward pass per process; the graphs of earlier
    micro-batches are gone, so with accumulation the states get the gradient of the mean over
    micro-batches of R1 within each.

    Args:
        counts: predictions, tokens without padding, and both again of what the head trains on; of
            the whole step, int64 [4].
        micro_batches: forward passes of one process.

    Attributes:
        labels: predictions of the step, int64 scalar.
        tokens: tokens of the step, without padding, int64 scalar.
    """

    def __init__(self, counts: Int64[Tensor, "4"], micro_batches: int) -> None:
        self.labels, self.tokens, self._head_labels, self._head_tokens = counts.unbind()
        self._micro_batches = micro_batches
        self._passes = 0
        self._best: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls, batches: Sequence[dict[str, Tensor]], positions: Tensor | None = None
    ) -> OptimizerStep:
        """Count the micro-batches of this process, and add up over all processes.

        Args:
            batches: what goes into the forward passes, [B, T] each.
            positions: those of each row that the head trains on, or None for all.
        """
        counts = torch.stack([_counts(batch, positions) for batch in batches]).sum(0)
        return cls(distributed.sum_over_processes(counts), len(batches))

    def loss_arguments(self, model: Any) -> dict[str, Any]:
        """Return what makes a decoder divide its loss by the step's count, if it can do that."""
        return {"num_items_in_batch": self.labels.clamp_min(1)} if divides_by_count(model) else {}

    def share_of_ce(self, model: Any, ce: Tensor, labels: Tensor) -> Tensor:
        """Return what one forward pass contributes to the step's cross-entropy.

        Args:
            model: the decoder, called with :meth:`loss_arguments`.
            ce: its loss.
            labels: int64 [B, T], what the loss was of.
        """
        if divides_by_count(model):
            return ce
        return ce * ((labels[:, 1:] != NO_LABEL).sum() / self.labels.clamp_min(1))

    def shares(
        self,
        parts: dict[str, Tensor],
        states: States,
        head: PrototypeHead,
        routing: Routing,
    ) -> dict[str, Tensor]:
        """Return what the head's losses on one forward pass contribute to those of the step.

        Called once for every forward pass of the step, in every process.

        Args:
            parts: means over this pass, by name.
            states: what they come from.
            head: holds the prototypes.
            routing: of the states.
        """
        own_tokens = len(states.z) if states.mask is None else states.mask.sum()
        own_labels = 0 if states.labels is None else (states.labels != NO_LABEL).sum()
        passes = self._micro_batches * distributed.world_size()
        share = {
            "tokens": own_tokens / self._head_tokens.clamp_min(1),
            "labels": own_labels / self._head_labels.clamp_min(1),
            "passes": 1 / passes,
        }
        contributions = {
            name: part * share[MEAN_OVER[name]]
            for name, part in parts.items()
            if name != "prototype_pull"
        }
        pull = parts["prototype_pull"]
        if passes > 1:
            with torch.autocast(device_type=states.z.device.type, enabled=False):
                z = states.z.to(routing.cosines.dtype)
                pull = self._prototype_pull(z, head.prototypes, routing)
        return {name: contributions.get(name, pull) for name in parts}

    def _prototype_pull(
        self, z: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"], routing: Routing
    ) -> Float[Tensor, ""]:
        found = routing.nearest_point >= 0
        cosine = routing.nearest_point_cosine
        local = torch.where(found, cosine.detach(), NONE_FOUND)
        if self._micro_batches == 1:
            return _pull(cosine, _won(local))
        # Where no state was found the cosine says so, and any row will do.
        nearest = z[routing.nearest_point.clamp_min(0)]
        best_cosine, best_state = self._best = self._better(local, nearest.detach())
        self._passes += 1
        pull = prototypes.new_zeros((), dtype=z.dtype)
        if self._passes == self._micro_batches:
            pull = _pull(paired_cosines(best_state, prototypes), _won(best_cosine))
        if z.requires_grad:
            within = _pull(paired_cosines(nearest, prototypes.detach()), _won(local))
            # Only its gradient is wanted; the value is the step's own.
            pull = pull + (within - within.detach()) / self._micro_batches
        return pull

    def _better(self, cosine: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self._best is None:
            return cosine, state
        best_cosine, best_state = self._best
        better = cosine > best_cosine
        state = torch.where(better[:, None], state, best_state)
        return torch.where(better, cosine, best_cosine), state


def divides_by_count(model: Any) -> bool:
    """Say whether a decoder's own loss is Σ / ``num_items_in_batch`` where that is given.

    This is Trainer's criterion, but a router's loss is a mean in any case.
    """
    if getattr(model.config, "output_router_logits", False):
        return False
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _counts(batch: dict[str, Tensor], positions: Tensor | None) -> Int64[Tensor, "4"]:
    """Return predictions and tokens of a micro-batch, and of what the head trains on."""
    ids = batch["input_ids"]
    mask = batch.get("token_mask", batch.get("attention_mask"))
    everything = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    predicted = following(batch["labels"]) != NO_LABEL
    counted = [predicted, everything]
    counted += counted if positions is None else [predicted[:, positions], everything[:, positions]]
    return torch.stack([kept.sum() for kept in counted])


def paired_cosines(
    z: Float[Tensor, "K d"], prototypes: Float[Tensor, "K d"]
) -> Float[Tensor, " K"]:
    """Return cos(z_i, p_i), row by row; a zero row has cosine 0."""
    prototypes = prototypes.to(z.dtype)
    return ((z * inverse_norms(z)) * (prototypes * inverse_norms(prototypes))).sum(-1)


def _pull(cosines: Float[Tensor, " K"], mine: Bool[Tensor, " K"]) -> Float[Tensor, ""]:
    return -torch.where(mine, cosines, torch.zeros_like(cosines)).sum() / len(cosines)


def _won(cosine: Float[Tensor, " K"]) -> Bool[Tensor, " K"]:
    """Say for which prototypes this process has the best cosine, ties to the lower rank."""
    found = cosine > NONE_FOUND
    if distributed.world_size() == 1:
        return found
    best = cosine.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX)
    rank = distributed.rank()
    has_it = found & (cosine == best)
    owner = torch.where(has_it, rank, distributed.world_size())
    dist.all_reduce(owner, dist.ReduceOp.MIN)
    return owner == rank
