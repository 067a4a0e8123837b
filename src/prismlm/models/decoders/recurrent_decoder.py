"""Decoders whose mixers carry a state: everything but the mixer, for Hugging Face's library.

    h ← h + dropout(mixer(RMSNorm(h))),   h ← h + dropout(SwiGLU(RMSNorm(h)))

Padding takes no part wherever it stands in a row. Without a mask and a cache, a sequence starts
wherever position ids do not go up by one, as in Hugging Face's own decoders, and sees nothing of
what is before it: documents packed into one training row stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput, can_return_tuple

from prismlm.errors import InputError
from prismlm.layers.causal_convolution import CausalConvolution
from prismlm.models.decoders.own_decoder import LanguageModelMixin, OwnDecoder
from prismlm.models.decoders.recurrent_cache import RecurrentCache
from prismlm.models.decoders.recurrent_config import RecurrentConfig


@dataclass
class RecurrentOutput(ModelOutput):
    """What a recurrent decoder gives; Hugging Face's usual fields, and the mixers' evidence.

    Attributes:
        loss: cross-entropy of the next token, with labels.
        logits: [B, T, V], of the language model.
        last_hidden_state: [B, T, d], of the model without its output embedding.
        past_key_values: the cache, if one was asked for.
        hidden_states: of the embeddings and of every block, if asked for.
        gates: each layer's evidence, if asked for.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: RecurrentCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    gates: tuple[Any, ...] | None = None


class SwiGLU(nn.Module):
    """W_down dropout(silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed positions."""
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.dropout(inner, self.dropout, self.training))


class RecurrentBlock(GradientCheckpointingLayer):
    """A mixer and a SwiGLU, each behind an RMSNorm and beside a skip connection."""

    def __init__(self, config: Any, mixer: nn.Module, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.dropout)
        self.dropout = config.dropout

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: RecurrentCache | None = None,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
        return_evidence: bool = False,
    ) -> tuple[Tensor, Any]:
        """Return the next hidden states, and the mixer's evidence if it was asked for."""
        cached = None if past_key_values is None else past_key_values.layers[self.layer]
        mixed = self.mixer(
            self.mixer_norm(hidden_states),
            state=None if cached is None else cached.state,
            mask=mask,
            starts=starts,
            return_evidence=return_evidence,
        )
        if cached is not None:
            cached.advance(mixed.state, hidden_states.shape[1])
        hidden_states = hidden_states + self._dropped(mixed.output)
        hidden_states = hidden_states + self._dropped(self.mlp(self.mlp_norm(hidden_states)))
        return hidden_states, mixed.evidence

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class RecurrentPreTrainedModel(OwnDecoder):
    """Initialisation, checkpoints and what Hugging Face's library has to know."""

    config_class = RecurrentConfig
    _no_split_modules = ["RecurrentBlock"]  # noqa: RUF012 (the library's own declaration)
    cache_class = RecurrentCache
    cache_form = "a recurrent state"
    keeps_documents_apart = True
    """Sequences start anew where position ids do; said here so that no model need be run for it."""
    # A state cannot be rolled back, which assisted generation would need.
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CausalConvolution):
            bound = module.width**-0.5
            init.uniform_(module.weight, -bound, bound)


class RecurrentModel(RecurrentPreTrainedModel):
    """Embeddings, blocks and the last norm; each family says what mixer a layer has.

    Raises:
        InputError: settings that no model can be built from; in a call, neither or both of input
            ids and embeddings, or inputs that do not fit together.
    """

    if TYPE_CHECKING:

        def mixer_of(self, config: Any, layer: int) -> nn.Module:
            """Return a layer's mixer: ``mixer(x, state, mask, starts, return_evidence)``."""
            ...

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # Once more: settings can be changed after the configuration is made.
        config.validate_architecture()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            RecurrentBlock(config, self.mixer_of(config, layer), layer)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_gates: bool = False,
        **kwargs: Any,
    ) -> RecurrentOutput:
        """Run the decoder; see the language model's forward."""
        embedded = self._embedded(input_ids, inputs_embeds)
        cache = self._cache_of_call(past_key_values, use_cache)
        if cache is not None:
            cache.claim(self.config.state_layout, len(embedded))
        held = 0 if cache is None else cache.get_seq_length()
        mask = _mask(attention_mask, embedded, held)
        starts = None
        if attention_mask is None and past_key_values is None:
            starts = _starts(position_ids, embedded)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states = F.dropout(embedded, self.config.dropout, self.training)
        states, evidence = [hidden_states], []
        for block in self.layers:
            hidden_states, gates = block(
                hidden_states,
                past_key_values=cache,
                mask=mask,
                starts=starts,
                return_evidence=output_gates,
            )
            states.append(hidden_states)
            evidence.append(gates)
        hidden_states = self.norm(hidden_states)
        return RecurrentOutput(
            last_hidden_state=hidden_states,
            past_key_values=cache,
            hidden_states=(*states[:-1], hidden_states) if output_hidden_states else None,
            gates=tuple(evidence) if output_gates else None,
        )


class RecurrentForCausalLM(RecurrentPreTrainedModel, LanguageModelMixin, GenerationMixin):
    """A recurrent decoder with an output embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    decoder_class: type[RecurrentModel] = RecurrentModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        output_gates: bool = False,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> RecurrentOutput:
        """Predict the next token at each position.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], or [B, past + T] with a cache; 0 on padding.
            position_ids: int64 [B, T]; without mask and cache, a sequence starts wherever they do
                not go up by one. They are used for nothing else.
            past_key_values: the cache that an earlier call returned.
            inputs_embeds: [B, T, d] in place of input ids.
            labels: int64 [B, T], −100 where nothing is to be predicted; shifted here.
            use_cache: whether to return a cache.
            output_hidden_states: whether to return hidden states.
            output_gates: whether to return each layer's evidence.
            logits_to_keep: how many of the last positions, or which positions, get logits; 0 for
                all.
            **kwargs: of the loss, ``num_items_in_batch``.

        Raises:
            InputError: inputs that do not fit together.
        """
        return self._predict(
            labels,
            logits_to_keep,
            kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_gates=output_gates,
        )


def _mask(attention_mask: Tensor | None, embedded: Tensor, held: int) -> Tensor | None:
    """Return which of the positions at hand are tokens, or None if all are.

    Args:
        attention_mask: over them, or over the ``held`` positions in the cache and them.
        embedded: [B, T, d].
        held: positions that are in the cache.
    """
    if attention_mask is None:
        return None
    batch, length = embedded.shape[:2]
    if attention_mask.shape not in ((batch, length), (batch, held + length)):
        cached = f", or [{batch}, {held + length}] with what is in the cache" if held else ""
        raise InputError(
            f"attention_mask is {list(attention_mask.shape)}: expected [{batch}, {length}]"
            f"{cached}. A recurrent model takes no mask over pairs."
        )
    mask = attention_mask[:, -length:].bool()
    return None if bool(mask.all()) else mask


def _starts(position_ids: Tensor | None, embedded: Tensor) -> Tensor | None:
    """Return where sequences start within the rows, or None if nowhere."""
    if position_ids is None:
        return None
    batch, length = embedded.shape[:2]
    if position_ids.shape not in ((batch, length), (1, length)):
        raise InputError(
            f"position_ids are {list(position_ids.shape)}: expected [{batch}, {length}], or "
            f"[1, {length}] for all rows alike."
        )
    starts = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return starts.expand(len(embedded), -1) if bool(starts.any()) else None
