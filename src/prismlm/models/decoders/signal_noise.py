"""A language model of signal/noise attention, in the stack of nanoGPT."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.utils.generic import can_return_tuple

from prismlm.models.decoders.own_decoder import LanguageModelMixin
from prismlm.models.decoders.signal_noise_block import SignalNoiseBlock
from prismlm.models.decoders.signal_noise_config import SignalNoiseConfig
from prismlm.models.decoders.signal_noise_model import (
    SignalNoiseModel,
    SignalNoiseModelOutput,
    SignalNoisePreTrainedModel,
)
from prismlm.ops.experts import load_balancing_loss

IGNORED = -100
"""The label of what is not to be predicted."""


class SignalNoiseForCausalLM(SignalNoisePreTrainedModel, LanguageModelMixin, GenerationMixin):
    """A language model of signal/noise attention, LayerNorm and an MLP.

        Z ← Z + attention(LayerNorm(Z)),   Z ← Z + MLP(LayerNorm(Z))

    In place of GELU's two matrices the MLP can be sparse coding or a mixture of experts.

    A cache holds one unrotated tensor per head, half of what keys and values take.

    Source: Prism, §2 and §3.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: SignalNoiseConfig) -> None:
        super().__init__(config)
        self.model = SignalNoiseModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def multiplied_parameters(self) -> int:
        """Entries of matrices that one position is multiplied with; one used twice counts twice."""
        blocks = cast("list[SignalNoiseBlock]", list(self.model.layers))
        each = [block.attention.multiplications + block.mlp.multiplications for block in blocks]
        return sum(each) + self.lm_head.weight.numel()

    def kept_bytes(self, size: int) -> int:
        """Return what the backward pass of all blocks reads of one position, in bytes.

        Args:
            size: bytes of a number in the products of matrices: 2 in bf16, 4 in float32.
        """
        return sum(
            block.kept_bytes(size) for block in cast("list[SignalNoiseBlock]", self.model.layers)
        )

    @property
    def attention_width(self) -> int:
        """The width of all heads together, R·d."""
        return self.config.expansion * self.config.hidden_size

    def set_noise_weight(self, value: float | Tensor) -> None:
        """Set λ; see :meth:`SignalNoiseModel.set_noise_weight`."""
        self.model.set_noise_weight(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> SignalNoiseModelOutput:
        """Predict the next token at each position.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], or [B, past + T] with a cache; 0 on padding.
            position_ids: int64 [B, T]; without a mask and with nothing in the cache, a sequence
                starts wherever they do not go up by one, and sees nothing of what is before it.
            past_key_values: the cache that an earlier call returned.
            inputs_embeds: [B, T, d] in place of input ids.
            labels: int64 [B, T], −100 where nothing is to be predicted; shifted here.
            use_cache: whether to return a cache.
            output_hidden_states: whether to return hidden states.
            output_router_logits: whether to return router logits and their loss, which the loss
                then counts; None for what the configuration says.
            logits_to_keep: how many of the last positions, or which positions, get logits; 0 for
                all.
            **kwargs: of the loss, ``num_items_in_batch``.

        Raises:
            InputError: inputs that do not fit together.
        """
        output = self._predict(
            labels,
            logits_to_keep,
            {name: value for name, value in kwargs.items() if name != "output_attentions"},
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_router_logits=output_router_logits,
            output_attentions=kwargs.get("output_attentions"),
        )
        if output.router_logits is None:
            return output
        count = kwargs.get("num_items_in_batch")
        return self._balanced(output, attention_mask, labels, count)

    def _balanced(
        self,
        output: SignalNoiseModelOutput,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        count: Tensor | int | None,
    ) -> SignalNoiseModelOutput:
        """Add the loss of the routers, weighted in the loss if there is one."""
        routers, logits = output.router_logits, output.logits
        assert routers is not None
        assert logits is not None
        mask = _tokens(attention_mask, len(routers[0]) // len(logits))
        aux_loss = load_balancing_loss(routers, self.config.num_experts_per_tok, mask)
        loss = output.loss
        if loss is not None and labels is not None:
            weight = self.config.router_aux_loss_coef * _share(labels, count)
            loss = loss + weight * aux_loss.to(loss.device)
        return SignalNoiseModelOutput(**dict(output) | {"loss": loss, "aux_loss": aux_loss})


def _tokens(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Return which of the positions at hand are no padding, bool [B·T], as far as a mask says."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    return attention_mask[:, -length:].bool().flatten()


def _share(labels: Tensor, count: Tensor | int | None) -> Tensor | float:
    """Return the share of a step's predictions that are made here.

    With it the parts of a step add up to a mean, as those of the cross-entropy do.
    """
    if count is None:
        return 1.0
    return (labels[:, 1:] != IGNORED).sum() / count
