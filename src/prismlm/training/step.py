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
from jaxtyping import Int64
from torch import Tensor

from prismlm.training import distributed
from prismlm.training.objective import NO_LABEL, States, following

# What a part of the head's loss is a mean over.
MEAN_OVER = {
    "prototype_pull": "passes",
    "point_pull": "tokens",
    "residual": "tokens",
    "prototype_only_ce": "labels",
    "prototype_only_kl": "labels",
    "diversity": "passes",
}


class OptimizerStep:
    """How much there is in one optimizer step.

        CE, R2, RES:  Σ over the step's tokens / their number in the whole step
        R1, DIV:      mean over the forward passes of the step

    The minimum of R1 is over the states of one pass: what one process sees in one micro-batch.

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

    def shares(self, parts: dict[str, Tensor], states: States) -> dict[str, Tensor]:
        """Return what the head's losses on one forward pass contribute to those of the step.

        Args:
            parts: means over this pass, by name.
            states: what they come from.
        """
        own_tokens = len(states.z) if states.mask is None else states.mask.sum()
        own_labels = 0 if states.labels is None else (states.labels != NO_LABEL).sum()
        share = {
            "tokens": own_tokens / self._head_tokens.clamp_min(1),
            "labels": own_labels / self._head_labels.clamp_min(1),
            "passes": 1 / (self._micro_batches * distributed.world_size()),
        }
        return {name: part * share[MEAN_OVER[name]] for name, part in parts.items()}


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
