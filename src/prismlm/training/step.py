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
from jaxtyping import Bool, Float
from torch import Tensor

from prismlm.layers import PrototypeHead
from prismlm.ops.prototype_head import Routing
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.training import distributed

IGNORED = -100
# What a part of the loss is a mean over. R1 has an extremum instead, and its own way.
MEAN_OVER = {"point_pull": "tokens", "residual": "tokens", "diversity": "passes"}
NONE_FOUND = -2.0


class Step:
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

    Attributes:
        labels: predictions of the step, int64 scalar.
        tokens: tokens without padding of the step, int64 scalar.
        micro_batches: forward passes of one process.
    """

    def __init__(self, labels: Tensor, tokens: Tensor, micro_batches: int) -> None:
        self.labels = labels
        self.tokens = tokens
        self.micro_batches = micro_batches
        self._passes = 0
        self._best_cosine: Tensor | None = None
        self._best_state: Tensor | None = None

    @classmethod
    def of(cls, batches: Sequence[dict[str, Tensor]]) -> Step:
        """Count the micro-batches of this process, and add up over all processes."""
        labels = torch.stack([count_labels(batch["labels"]) for batch in batches]).sum()
        tokens = torch.stack([count_tokens(batch) for batch in batches]).sum()
        labels, tokens = distributed.sum_over_processes(torch.stack([labels, tokens])).unbind()
        return cls(labels, tokens, len(batches))

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
        return ce * (count_labels(labels) / self.labels.clamp_min(1))

    def shares(
        self,
        parts: dict[str, Tensor],
        z: Float[Tensor, "... d"],
        head: PrototypeHead,
        routing: Routing,
        mask: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return what the losses of one forward pass contribute to those of the step.

        Called once for every forward pass of the step, in every process.

        Args:
            parts: means over this pass, by name.
            z: the states they come from.
            head: holds the prototypes.
            routing: of the states.
            mask: bool, false on padding.
        """
        passes = self.micro_batches * distributed.world_size()
        own = routing.indices.shape[0] if mask is None else mask.sum()
        share = {"tokens": own / self.tokens.clamp_min(1), "passes": 1 / passes}
        contributions = {
            name: part * share[MEAN_OVER[name]]
            for name, part in parts.items()
            if name != "prototype_pull"
        }
        if passes == 1:
            pull = parts["prototype_pull"]
        else:
            with torch.autocast(device_type=z.device.type, enabled=False):
                states = z.flatten(0, -2).to(routing.cosines.dtype)
                pull = self._prototype_pull(states, head.prototypes, routing)
        return {name: contributions.get(name, pull) for name in parts}

    def _prototype_pull(
        self, z: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"], routing: Routing
    ) -> Float[Tensor, ""]:
        found = routing.nearest_point >= 0
        cosine = routing.nearest_point_cosine
        local = torch.where(found, cosine.detach(), NONE_FOUND)
        if self.micro_batches == 1:
            return _pull(cosine, _won(local))
        # Where no state was found the cosine says so, and any row will do.
        nearest = z[routing.nearest_point.clamp_min(0)]
        self._keep(local, nearest.detach())
        assert self._best_cosine is not None
        assert self._best_state is not None
        self._passes += 1
        pull = prototypes.new_zeros((), dtype=z.dtype)
        if self._passes == self.micro_batches:
            pull = _pull(paired_cosines(self._best_state, prototypes), _won(self._best_cosine))
        if z.requires_grad:
            within = _pull(paired_cosines(nearest, prototypes.detach()), _won(local))
            # Only its gradient is wanted; the value is the step's own.
            pull = pull + (within - within.detach()) / self.micro_batches
        return pull

    def _keep(self, cosine: Tensor, state: Tensor) -> None:
        if self._best_cosine is None or self._best_state is None:
            self._best_cosine, self._best_state = cosine, state
            return
        better = cosine > self._best_cosine
        self._best_cosine = torch.where(better, cosine, self._best_cosine)
        self._best_state = torch.where(better[:, None], state, self._best_state)


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


def count_labels(labels: Tensor) -> Tensor:
    """Return how many predictions decoders make of labels [B, T], which they shift by one."""
    return (labels[:, 1:] != IGNORED).sum()


def count_tokens(batch: dict[str, Tensor]) -> Tensor:
    """Return how many positions of a micro-batch are not padding."""
    mask = batch.get("token_mask", batch.get("attention_mask"))
    ids = batch["input_ids"]
    return torch.tensor(ids.numel(), device=ids.device) if mask is None else mask.bool().sum()


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
