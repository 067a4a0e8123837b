"""The model that is trained: a Hugging Face decoder with a prototype head beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.models.seam import capture
from prismlm.ops.prototype_head import Routing

HEAD_LOSSES = ("prototype_pull", "point_pull", "residual", "diversity")
LOSS_PARTS = ("ce", *HEAD_LOSSES)
IGNORED_AT_INFERENCE = ("past_key_values", "losses", "routing")


@dataclass(frozen=True)
class LossWeights:
    """How much each loss of the head counts beside the cross-entropy.

    Attributes:
        prototype_pull: weight of R1, every prototype to its nearest state.
        point_pull: weight of R2, every state to its nearest prototype.
        residual: weight of RES, ‖z − ẑ‖².
        diversity: weight of DIV, the mean squared cosine between prototypes.
    """

    prototype_pull: float = 0.1
    point_pull: float = 0.1
    residual: float = 0.1
    diversity: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise InputError(
                    f"the weight of {field.name} is {getattr(self, field.name)}; "
                    "expected 0 or a positive number."
                )


@dataclass
class PrismOutput(ModelOutput):
    """What one forward pass gives.

    Attributes:
        loss: CE + loss_scale · Σ weight · part, or None without labels.
        logits: [B, T, V], the model's own.
        past_key_values: the cache, if one was asked for.
        losses: unweighted scalars by name: ce, prototype_pull, point_pull, residual, diversity.
        routing: the prototypes of each of the B·T states; None before they are placed.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    losses: dict[str, Tensor] | None = None
    routing: Routing | None = None


class PrismForCausalLM(nn.Module):
    """Run a decoder and its prototype head in one forward pass.

        loss = CE + s · (w₁ R1 + w₂ R2 + w₃ RES + w₄ DIV)

    with s = ``loss_scale`` in [0, 1]. The decoder's own forward, loss and logits are as without
    the head; it reads the state z that enters the output embedding. Before the prototypes are
    placed the head is left out and the loss is the plain CE.

    R1 takes its minimum over the states of one forward pass, so over a micro-batch when
    gradients are accumulated: with many prototypes and small micro-batches it pulls harder.

    Source: PRISM: Training Data Prototypes for Language Models (Guide Labs, 2025).

    Args:
        model: a Hugging Face causal language model.
        head: a prototype head as wide as the model's last hidden state.
        weights: what each loss of the head counts.
        detach: keep the head's gradients out of the model, which then trains bit for bit as it
            would without a head.
        residual_reduction: whether RES averages over the d elements or sums.
        placed: whether the prototypes hold something; False leaves the head out until
            :meth:`mark_placed`.
    """

    accepts_loss_kwargs = False
    main_input_name = "input_ids"
    head_placed: Tensor

    def __init__(
        self,
        model: Any,
        head: PrototypeHead,
        *,
        weights: LossWeights | None = None,
        detach: bool = False,
        residual_reduction: Literal["mean", "sum"] = "mean",
        placed: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.prototype_head = head
        self.weights = weights if weights is not None else LossWeights()
        self.detach = detach
        self.residual_reduction: Literal["mean", "sum"] = residual_reduction
        self.loss_scale = 1.0
        self.register_buffer("head_placed", torch.tensor(placed))

    @property
    def config(self) -> Any:
        """The decoder's configuration."""
        return self.model.config

    @property
    def placed(self) -> bool:
        """Whether the prototypes are placed and the head takes part."""
        return bool(self.head_placed)

    def mark_placed(self, placed: bool = True) -> None:
        """Let the head take part, or not, from the next forward pass on."""
        self.head_placed.fill_(placed)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the decoder, which the head does not change."""
        return self.model.generate(*args, **kwargs)

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
        """Run the decoder, then the head on the states it sent to its output embedding.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], as the decoder takes it; none for packed rows.
            position_ids: int64 [B, T], from 0 again at every document of a packed row.
            labels: int64 [B, T], −100 where nothing is to be predicted; the decoder shifts them.
            token_mask: bool [B, T], false on padding; ``attention_mask`` stands in for it.
            **kwargs: passed on to the decoder.

        Raises:
            InputError: there is no token at all.
        """
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
            z = seen.z.detach() if self.detach else seen.z
            routing, parts = self._run_head(z, None if mask is None else mask.bool())
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

    def _run_head(self, z: Tensor, mask: Tensor | None) -> tuple[Routing, dict[str, Tensor]]:
        head = self.prototype_head
        output = head(z, mask=mask)
        parts = head.losses(z, output, mask=mask, residual_reduction=self.residual_reduction)
        return output.routing, parts._asdict()

    def total(self, ce: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """Add the weighted losses of the head to the cross-entropy; no parts leave it as it is."""
        loss = ce
        for name, part in parts.items():
            weight = getattr(self.weights, name)
            if weight:
                loss = loss + self.loss_scale * weight * part
        return loss
