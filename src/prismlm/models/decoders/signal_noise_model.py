"""The blocks of a decoder of signal/noise attention, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.utils.generic import ModelOutput, can_return_tuple

from prismlm.errors import FormatError, InputError
from prismlm.layers.mlp import OutputLinear
from prismlm.layers.signal_noise_attention import SignalNoiseAttention
from prismlm.layers.sparse_coding import SparseCoding
from prismlm.models.decoders.own_decoder import OwnDecoder
from prismlm.models.decoders.projection_cache import ProjectionCache
from prismlm.models.decoders.signal_noise_block import SignalNoiseBlock
from prismlm.models.decoders.signal_noise_checks import (
    check_config,
    check_noise_weight_set,
    check_router_asked_for,
)
from prismlm.models.decoders.signal_noise_config import SignalNoiseConfig


@dataclass
class SignalNoiseModelOutput(ModelOutput):
    """What the decoder gives; Hugging Face's usual fields.

    Attributes:
        loss: cross-entropy of the next token, with labels; with router logits asked for,
            router_aux_loss_coef · aux_loss more.
        logits: [B, T, V], of the language model.
        last_hidden_state: [B, T, d], of the model without its output embedding.
        past_key_values: the cache, if one was asked for.
        hidden_states: of the embeddings and of every block, if asked for.
        aux_loss: load-balancing loss of the routers, of the language model, if asked for.
        router_logits: [B·T, E] of every block, if asked for.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: ProjectionCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


class SignalNoisePreTrainedModel(OwnDecoder):
    """Initialisation, checkpoints and what Hugging Face's library has to know."""

    config_class = SignalNoiseConfig
    _supports_sdpa = True
    _no_split_modules = ["SignalNoiseBlock"]  # noqa: RUF012 (the library's own declaration)
    # λ, also of a checkpoint that is opened in half precision.
    _keep_in_fp32_modules_strict = ["noise_weight"]  # noqa: RUF012
    cache_class = ProjectionCache
    cache_form = "the cache of tied heads"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SignalNoiseAttention):
            signal, noise = module.initial_frequencies()
            init.copy_(module.signal_frequencies, signal)
            init.copy_(module.noise_frequencies, noise)
            if module.output_projection is not None:
                self._init_smaller(module.output_projection)
        elif isinstance(module, OutputLinear):
            # At the matrix itself: a module without tensors of its own never gets here.
            self._init_smaller(module)
        elif isinstance(module, SparseCoding):
            init.normal_(module.dictionary, std=module.initial_deviation)
        elif isinstance(module, SignalNoiseModel):
            init.constant_(module.noise_weight, self.config.noise_weight)

    def _init_smaller(self, module: nn.Linear) -> None:
        """Draw what adds to the stream as GPT-2 does, by the number of such additions."""
        depth = 2 * self.config.num_hidden_layers
        init.normal_(module.weight, std=self.config.initializer_range * depth**-0.5)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, as Hugging Face's models do.

        Raises:
            FormatError: the checkpoint holds no λ, one outside of [0, 1], or a tensor of another
                shape than the configuration asks for.
        """
        wanted = kwargs.pop("output_loading_info", False)
        allowed = kwargs.pop("ignore_mismatched_sizes", False)
        parent: Any = super()
        # Otherwise the library's error names no tensor, and comes with its whole report.
        model, info = parent.from_pretrained(
            *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        for key, held, expected in sorted(info["mismatched_keys"]):
            if not allowed or key.endswith("noise_weight"):
                raise FormatError(
                    f"the checkpoint {args[0] if args else ''} holds {key!r} of shape "
                    f"{list(held)}, and the configuration beside it makes it {list(expected)}: it "
                    "is damaged, or was edited by hand."
                )
        missing = [key for key in info["missing_keys"] if key.endswith("noise_weight")]
        if missing:
            raise FormatError(
                f"the checkpoint {args[0] if args else ''} has no {missing[0]!r}, the weight λ of "
                "the noise heads that it was trained with: add that tensor of one number to it."
            )
        for name, weight in model.named_buffers():
            # On the meta device there is no value to look at.
            if name.endswith("noise_weight") and not weight.is_meta and not 0 <= weight.item() <= 1:
                raise FormatError(
                    f"the checkpoint {args[0] if args else ''} holds {name!r} = {weight.item():g}: "
                    "expected λ from 0 to 1. It is damaged, or was edited by hand."
                )
        return (model, info) if wanted else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, as Hugging Face's models do, with λ in the configuration too."""
        weight = cast(Tensor, self.base_model.noise_weight)
        if not weight.is_meta:
            # As it is written shortest: 0.1 and not the float32 nearest to it.
            self.config.noise_weight = float(str(np.float32(weight.item())))
        super().save_pretrained(*args, **kwargs)


class SignalNoiseModel(SignalNoisePreTrainedModel):
    """Embeddings, blocks and the last norm.

    Attributes:
        noise_weight: λ, a buffer of every checkpoint; training raises it step by step.

    Raises:
        InputError: sizes that do not divide, an odd number of heads, λ outside of [0, 1], or a
            setting that :func:`check_config` does not take.
    """

    noise_weight: Tensor

    def __init__(self, config: SignalNoiseConfig) -> None:
        super().__init__(config)
        check_config(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            SignalNoiseBlock(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        # Whatever the default dtype is: it rises in steps that half precision would round away.
        noise_weight = torch.tensor(config.noise_weight, dtype=torch.float32)
        self.register_buffer("noise_weight", noise_weight)
        self.gradient_checkpointing = False
        self.post_init()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SignalNoiseModel:
        """Move or cast the model; λ stays float32 at least."""
        before = self.noise_weight
        super()._apply(fn, recurse)
        if self.noise_weight.dtype.itemsize < before.dtype.itemsize:
            self.noise_weight = before.to(self.noise_weight.device)
        return self

    def set_noise_weight(self, value: float | Tensor) -> None:
        """Set λ.

        Args:
            value: a number, or a tensor of one.

        Raises:
            InputError: it is no number, or outside of [0, 1].
        """
        check_noise_weight_set(value)
        self.noise_weight.fill_(value)

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
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> SignalNoiseModelOutput:
        """Run the decoder; see the language model's forward."""
        if kwargs.get("output_attentions"):
            raise InputError(
                "output_attentions is on, and this model's attention never holds its weights: read "
                "them with prismlm.models.attention.reading_attention."
            )
        embedded = self._embedded(input_ids, inputs_embeds)
        cache = self._cache(past_key_values, use_cache, len(embedded))
        # Positions of our own have no second sequence, and looking for one reads their values.
        mask = self._mask(attention_mask, embedded, cache, position_ids)
        if position_ids is None:
            position_ids = _positions(attention_mask, embedded, cache)
        position_ids = position_ids.expand(len(embedded), -1)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        check_router_asked_for(self.config, output_router_logits)
        hidden_states = F.dropout(embedded, self.config.dropout, self.training)
        states, routers = [hidden_states], []
        for block in self.layers:
            hidden_states, router_logits = block(
                hidden_states,
                self.noise_weight,
                position_ids,
                mask=mask,
                past_key_values=cache,
            )
            states.append(hidden_states)
            routers.append(router_logits)
        hidden_states = self.norm(hidden_states)
        return SignalNoiseModelOutput(
            last_hidden_state=hidden_states,
            past_key_values=cache,
            hidden_states=(*states[:-1], hidden_states) if output_hidden_states else None,
            router_logits=tuple(routers) if output_router_logits else None,
        )

    def _mask(
        self,
        given: Tensor | None,
        embedded: Tensor,
        cache: ProjectionCache | None,
        positions: Tensor | None,
    ) -> Tensor | None:
        """Return which position sees which, bool [B, 1, T, S]; None for all up to itself."""
        # Beside a cache positions are not looked at for where sequences start; an empty one, which
        # a call has unless told otherwise, would let packed sequences see each other.
        held = cache if cache is not None and cache.get_seq_length() else None
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=given,
            past_key_values=held,
            position_ids=positions,
        )
        found = cast(Tensor | None, mask)
        if found is not None and found is not given and found.is_floating_point():
            # With attn_implementation="eager" masks are added to scores: 0 where a position sees.
            return found == 0
        return found

    def _cache(
        self, given: Cache | None, use_cache: bool | None, batch: int
    ) -> ProjectionCache | None:
        cache: ProjectionCache | None = self._cache_of_call(given, use_cache)
        if cache is not None and cache is given:
            attention = cast(SignalNoiseBlock, self.layers[0]).attention
            heads = (2 * attention.heads, attention.head_size)
            cache.check(self.config.num_hidden_layers, heads, batch)
        return cache


def _positions(
    attention_mask: Tensor | None, embedded: Tensor, cache: ProjectionCache | None
) -> Tensor:
    """Return positions that count tokens, not padding."""
    length = embedded.shape[1]
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, -length:]
    seen = 0 if cache is None else cache.get_seq_length()
    return torch.arange(seen, seen + length, device=embedded.device)[None]
