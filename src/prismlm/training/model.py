"""The model that is trained: a Hugging Face decoder with a prototype head beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.layers.prototype_head import HeadOutput
from prismlm.models.seam import Captured, LogitMap, capture, output_embedding
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.ops.prototype_head import Routing
from prismlm.training import parallel
from prismlm.training.losses import (
    LossWeights,
    OutputMap,
    VocabularySample,
    next_labels,
    prototype_only_losses,
    sample_positions,
)

# Candidates for a revival are drawn from the worst quarter of a forward pass's states: the very
# worst alone would often be one another's neighbours.
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
        """Take in one forward pass, waiting for nothing; padding counts for nothing."""
        routing, z = output.routing, z.float()
        used = routing.activations > 0
        errors = (z - output.reconstruction).square().sum(-1)
        if mask is not None:
            used, errors = used & mask[:, None], errors.masked_fill(~mask, -1.0)
        self.counts = self.counts.to(z.device)
        self.counts.scatter_add_(0, routing.indices.flatten(), used.flatten().long())
        errors, rows = errors.topk(round(WORST * len(z)))
        # The worst again in place of padding, where there is little else.
        self.worst = z[torch.where(errors >= 0, rows, rows[:1])]

    def merge(self) -> None:
        """Take in the other processes' counts and states: all of them then revive the same."""
        self.counts = parallel.over_processes(self.counts)
        if self.worst is not None:
            self.worst = parallel.concatenate(self.worst)

    def state(self) -> Tensor:
        """Return the counts of all processes together; every process has to call."""
        return parallel.over_processes(self.counts).cpu()

    def load(self, counts: Tensor) -> None:
        """Resume from saved counts, which the first process takes over for all."""
        self.counts = counts if parallel.is_main() else torch.zeros_like(counts)

    def reset(self) -> None:
        """Start counting again."""
        self.counts = torch.zeros_like(self.counts)
        self.worst = None


@dataclass
class PrismOutput(ModelOutput):
    """What one forward pass gives.

    Attributes:
        loss: CE + loss_scale · Σ weight · part, or None without labels.
        logits: [B, T, V], the model's own.
        past_key_values: the cache, if one was asked for.
        losses: unweighted scalars by name: ce, prototype_pull, point_pull, residual, diversity,
            and prototype_only_ce and prototype_only_kl if they have a weight; in training
            diversity, too, needs one.
        routing: the prototypes of each of the N states the head was run on: all B·T, or in
            training those of ``sampled_positions``; None before they are placed.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    losses: dict[str, Tensor] | None = None
    routing: Routing | None = None


class PrismForCausalLM(nn.Module):
    """Run a decoder and its prototype head in one forward pass.

        loss = CE + s · Σ_i w_i L_i,   L = R1, R2, RES, DIV, prototype-only CE and KL

    with s = ``loss_scale`` in [0, 1]. The decoder's own forward, loss and logits are as without
    the head; it reads the state z that enters the output embedding. Before the prototypes are
    placed the head is left out and the loss is the plain CE.

    Means, and R1's minimum, are over one forward pass.

    Source: PRISM: Training Data Prototypes for Language Models (Guide Labs, 2025).

    Attributes:
        uncertainty: the feedback that stands in the model, trained with it, or None.
        usage: counts uses of prototypes, if unused ones are to be revived.
        vocabulary: in training the prototype-only KL is over a sample of it; None: over all of it.
        step: of the run, which positions and tokens of a step are drawn from.

    Args:
        model: a Hugging Face causal language model, uncertainty feedback attached before.
        head: a prototype head as wide as the model's last hidden state.
        weights: what each loss of the head counts.
        detach: keep the head's gradients out of the model, which then trains bit for bit as it
            would without a head.
        residual_reduction: whether RES averages over the d elements or sums.
        position_share: share of a row's positions that the head is trained on in each step; they
            shift from step to step. The model trains on all of them.
        placed: whether the prototypes hold something; False leaves the head out.
    """

    accepts_loss_kwargs = False
    main_input_name = "input_ids"

    def __init__(
        self,
        model: Any,
        head: PrototypeHead,
        *,
        weights: LossWeights | None = None,
        detach: bool = True,
        residual_reduction: Literal["mean", "sum"] = "mean",
        position_share: float = 1.0,
        placed: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.prototype_head = head
        self.weights = weights if weights is not None else LossWeights()
        self.detach = detach
        self.residual_reduction: Literal["mean", "sum"] = residual_reduction
        self.position_share = position_share
        self.placed = placed
        self.loss_scale = 1.0
        self.prototypes_per_token = head.prototypes_per_token
        self.step = 0
        self.usage: Usage | None = None
        self.vocabulary: VocabularySample | None = None
        self.uncertainty = uncertainty_of(model)
        self.logit_map = LogitMap.of(model)

    @property
    def config(self) -> Any:
        """The decoder's configuration."""
        return self.model.config

    def table_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the table of uncertainty codes, if there is one."""
        return [] if self.uncertainty is None else list(self.uncertainty.embedding.parameters())

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Trade time for memory in the decoder."""
        self.model.gradient_checkpointing_enable(*args, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        self.model.gradient_checkpointing_disable()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        token_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> PrismOutput:
        """Run the decoder, then the head on the states it sent to its output embedding."""
        if not input_ids.numel():
            raise InputError(
                f"input_ids are {list(input_ids.shape)}: expected at least one row of one token."
            )
        # With a cache the decoder would not derive the mask of packed rows from position_ids.
        kwargs.setdefault("use_cache", False)
        with capture(self.model) as seen:
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                labels=labels,
                **kwargs,
            )
        mask = token_mask if token_mask is not None else attention_mask
        routing, parts = None, {}
        if self.placed:
            routing, parts = self.run_head(seen, None if mask is None else mask.bool(), labels)
        loss = None if labels is None else self.total(output.loss, parts)
        losses = {} if labels is None else {"ce": output.loss.detach()}
        losses |= {name: part.detach() for name, part in parts.items()}
        return PrismOutput(
            loss=loss,
            logits=output.logits,
            past_key_values=getattr(output, "past_key_values", None),
            losses=losses,
            routing=routing,
        )

    def run_head(
        self, seen: Captured, mask: Tensor | None, labels: Tensor | None
    ) -> tuple[Routing, dict[str, Tensor]]:
        """Run the head on what a forward pass sent through the output embedding.

        The prototype-only losses form N×V logits of their own, so they are left out at weight 0.
        """
        weights, device = self.weights, seen.z.device
        positions, sample = None, None
        if self.training and self.position_share < 1:
            length = seen.z.shape[1]
            positions = sample_positions(length, self.position_share, self.step, device)
        if self.training and self.vocabulary is not None and weights.prototype_only_kl:
            sample = self.vocabulary.to(device).draw(self.step)

        def flat(tensor: Tensor) -> Tensor:
            return (tensor if positions is None else tensor[:, positions]).flatten(0, 1)

        z = flat(seen.z.detach() if self.detach else seen.z)
        mask = None if mask is None else flat(mask)
        labels = None if labels is None else flat(next_labels(labels))
        head, k = self.prototype_head, self.prototypes_per_token
        output = head(z, mask=mask, prototypes_per_token=k)
        of_head = head.losses(
            z,
            output,
            mask=mask,
            residual_reduction=self.residual_reduction,
            with_diversity=weights.diversity > 0 or not self.training,
        )
        parts = {name: loss for name, loss in of_head._asdict().items() if loss is not None}
        if weights.prototype_only_ce or weights.prototype_only_kl:
            parts |= prototype_only_losses(
                z, output.reconstruction, labels, mask, self._output_map(), weights, sample
            )
        if self.training and self.usage is not None:
            self.usage.add(output, z.detach(), mask)
        return output.routing, parts

    def _output_map(self) -> OutputMap:
        embedding: Any = output_embedding(self.model)
        weight, bias = embedding.weight, getattr(embedding, "bias", None)
        if self.detach:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        return OutputMap(weight, bias, self.logit_map)

    def total(self, ce: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """Add the weighted losses of the head to the cross-entropy; no parts leave it as it is."""
        loss = ce
        for name, part in parts.items():
            weight = getattr(self.weights, name)
            if weight:
                loss = loss + self.loss_scale * weight * part
        return loss
