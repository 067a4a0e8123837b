"""A decoder of signal/noise attention, in the stack of nanoGPT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.utils.generic import ModelOutput, can_return_tuple

from prismlm.errors import FormatError, InputError
from prismlm.layers.mlp import OutputLinear
from prismlm.layers.signal_noise_attention import SignalNoiseAttention
from prismlm.layers.sparse_coding import SparseCoding
from prismlm.models.decoders.own_decoder import LanguageModelMixin, OwnDecoder
from prismlm.models.decoders.projection_cache import ProjectionCache
from prismlm.models.decoders.signal_noise_block import SignalNoiseBlock
from prismlm.models.decoders.signal_noise_checks import (
    check_config,
    check_noise_weight_set,
    check_router_asked_for,
)
from prismlm.models.decoders.signal_noise_config import SignalNoiseConfig
from prismlm.ops.experts import load_balancing_loss

IGNORED = -100
"""The label of what is not to be predicted."""


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


def _positions(
    attention_mask: Tensor | None, embedded: Tensor, cache: ProjectionCache | None
) -> Tensor:
    """Return positions that count tokens, not padding."""
    length = embedded.shape[1]
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, -length:]
    seen = 0 if cache is None else cache.get_seq_length()
    return torch.arange(seen, seen + length, device=embedded.device)[None]


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
