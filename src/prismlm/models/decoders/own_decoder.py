"""This package's decoders: settings, inputs, caches, output embedding; recurrent ones; DeltaNet.

Without mask and filled cache, a new sequence starts wherever position ids do not increase by one,
as in Hugging Face's decoders: documents packed into one training row do not see each other.
"""

# No postponed annotations: huggingface_hub checks settings by their types.
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, no_type_check

import torch
from huggingface_hub.dataclasses import as_validated_field, strict
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput, can_return_tuple

from prismlm.errors import InputError
from prismlm.layers.delta_mixer import DeltaMixer

INNER_MULTIPLE = 16


def number(expected: str, allowed: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a validated field for a number or None.

    ``interval`` of transformers ignores a minimum of 0.
    """

    @as_validated_field
    def check(value: Any) -> None:
        if value is not None and not allowed(value):
            raise ValueError(f"expected {expected}, got {value}.")

    return check


count = number("at least 1", lambda value: value >= 1)
share = number("at least 0 and below 1", lambda value: 0 <= value < 1)
positive = number("a positive, finite number", lambda value: 0 < value < math.inf)
finite = number("a finite number", math.isfinite)


# Its __init__ accepts more keywords than its signature, which jaxtyping would refuse.
@no_type_check
@strict
class OwnConfig(PreTrainedConfig):
    """Settings of every decoder of this package.

    Attributes:
        vocab_size, hidden_size: V and d.
        intermediate_size: width of the feed-forward network; None for the family's default.
        num_hidden_layers: number of blocks.
        dropout: after the token embeddings and on the outputs of blocks.
        initializer_range: initial standard deviation of embeddings and projections.
        use_cache: whether a forward pass returns a cache by default.
    """

    vocab_size: int = count(default=16000)
    hidden_size: int = count(default=256)
    intermediate_size: int | None = count(default=None)
    num_hidden_layers: int = count(default=6)
    dropout: float | int = share(default=0.1)
    initializer_range: float | int = positive(default=0.02)
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _RecurrentLayer(CacheLayerMixin):
    """The recurrent state of a layer: nested tuples of tensors [B, …] or None; ``tokens`` seen."""

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # there are no keys and values

    def update(self, state: Any, tokens: int) -> None:  # pyright: ignore
        """Set the state after ``tokens`` more positions."""
        self.state, self.is_initialized = state, True
        self.tokens += tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1  # no limit

    def reset(self) -> None:
        self.state: Any = None
        self.tokens = 0
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:  # transformers passes -n to remove n
            raise InputError(
                f"{abs(tokens_to_remove)} tokens cannot be removed from a recurrent state: copy "
                "the cache before adding them."
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda leaf: leaf.index_select(0, indices.to(leaf.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda leaf: leaf.repeat_interleave(repeats, 0))

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.state = tree_map_only(Tensor, function, self.state)


class _ProjectionLayer(DynamicLayer):
    """The unrotated projections Z U of S positions, and those positions.

    They are stored as keys [B, 2H, S, p], signal heads first, and values, int64 [B, 1, S, 1], so
    that ``DynamicLayer`` grows, crops and selects both.
    """

    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # The base class gives values the dtype of keys, which may round positions.
        self.values = torch.tensor([], dtype=value_states.dtype, device=value_states.device)


class OwnCache(Cache):
    """The cache of a decoder."""

    layer_class: type[_RecurrentLayer | _ProjectionLayer]
    layers: list[Any]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[self.layer_class() for _ in range(num_layers)])


class RecurrentCache(OwnCache):
    """The cache of a recurrent decoder: a state per layer."""

    layer_class = _RecurrentLayer


class ProjectionCache(OwnCache):
    """The cache of a signal/noise decoder: one unrotated tensor per head and layer."""

    layer_class = _ProjectionLayer


@dataclass
class OwnOutput(ModelOutput):
    """Hugging Face's usual fields, and, if requested, each layer's ``gates`` (evidence)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: OwnCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    gates: tuple[Any, ...] | None = None


class OwnDecoder(PreTrainedModel):
    """A decoder, with or without output embedding, with a cache of class ``cache_class``."""

    if TYPE_CHECKING:
        config: Any
        embed_tokens: nn.Embedding
        gradient_checkpointing: bool
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    cache_class: type[OwnCache] = OwnCache

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what transformers does not know from a module's ``initial_values()``."""
        super()._init_weights(module)
        for name, value in getattr(module, "initial_values", dict)().items():
            init.copy_(getattr(module, name), value)


class OwnModel(OwnDecoder):
    """Embeddings, blocks and the last norm.

    Blocks return hidden states and evidence. A family implements ``_block_arguments``, the
    arguments of every block.
    """

    _block_arguments: Callable[..., dict[str, Any]]

    def __init__(self, config: Any, block: Callable[[int], nn.Module], norm: nn.Module) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(layer) for layer in range(config.num_hidden_layers))
        self.norm = norm
        self.gradient_checkpointing = False

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
    ) -> OwnOutput:
        """Run the decoder; see the language model's forward."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give input_ids or inputs_embeds, and not both.")
        embedded: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache_for(past_key_values, use_cache)
        arguments = self._block_arguments(embedded, attention_mask, position_ids, cache)
        if output_gates:
            arguments["return_evidence"] = True
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states = F.dropout(embedded, self.config.dropout, self.training)
        states, evidence = [hidden_states], []
        for block in self.layers:
            hidden_states, layer_evidence = block(hidden_states, past_key_values=cache, **arguments)
            states.append(hidden_states)
            evidence.append(layer_evidence)
        hidden_states = self.norm(hidden_states)
        return OwnOutput(
            last_hidden_state=hidden_states,
            past_key_values=cache,
            hidden_states=(*states[:-1], hidden_states) if output_hidden_states else None,
            gates=tuple(evidence) if output_gates else None,
        )

    def _cache_for(self, cache: Cache | None, use_cache: bool | None) -> OwnCache | None:
        """Return the given cache, checked, a new one, or None.

        As in Hugging Face's decoders there is none with gradient checkpointing; a cache with
        positions is refused then, since its context would be ignored.
        """
        checkpointing = self.gradient_checkpointing and self.training
        if cache is None:
            use_cache = self.config.use_cache if use_cache is None else use_cache
            without = not use_cache or checkpointing
            return None if without else self.cache_class(self.config.num_hidden_layers)
        if not isinstance(cache, self.cache_class) or (checkpointing and cache.get_seq_length()):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}: a {type(self).__name__} takes the "
                f"{self.cache_class.__name__} that it returned, and none with positions while it "
                "trains with gradient checkpointing."
            )
        return None if checkpointing else cache


class OwnForCausalLM(OwnDecoder, GenerationMixin):
    """A decoder with an output embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    decoder_class: type[Any] = OwnModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model: Any = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.cache_class(self.config.num_hidden_layers)
            return None
        parent: Any = super()
        return parent._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )

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
    ) -> OwnOutput:
        """Predict the next token at each position, as Hugging Face's decoders do.

        Args:
            attention_mask: [B, T], or [B, past + T] with a cache; 0 on padding.
            position_ids: int64 [B, T]. ProtoT and DeltaNet use them only for the starts of packed
                sequences.
            output_gates: whether to return each layer's evidence, of ProtoT and DeltaNet.
            logits_to_keep: how many of the last positions, or which positions; 0 for all.
            **kwargs: of the loss.
        """
        inputs = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds
        outputs = self.model(
            *inputs, use_cache, output_hidden_states, output_gates, return_dict=True
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.lm_head(outputs.last_hidden_state[:, keep]), None
        if labels is not None:
            vocab_size = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        return OwnOutput(
            loss, logits, None, outputs.past_key_values, outputs.hidden_states, outputs.gates
        )


@no_type_check
@strict
class RecurrentConfig(OwnConfig):
    """Settings of recurrent decoders, in addition to :class:`OwnConfig`.

    ``dropout`` also acts inside SwiGLU. ``intermediate_size`` defaults to 8/3 d, rounded up to a
    multiple of 16. ``rms_norm_eps`` is added to the mean square.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "gates"]

    rms_norm_eps: float | int = positive(default=1e-6)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            multiples = -(-8 * self.hidden_size // (3 * INNER_MULTIPLE))
            self.intermediate_size = multiples * INNER_MULTIPLE
        super().__post_init__(**kwargs)


class SwiGLU(nn.Module):
    """W_down dropout(silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network."""
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.dropout(inner, self.dropout, self.training))


class RecurrentBlock(GradientCheckpointingLayer):
    """A mixer and a SwiGLU, each with RMSNorm and skip connection.

    h ← h + dropout(mixer(RMSNorm(h))),   h ← h + dropout(SwiGLU(RMSNorm(h)))
    """

    def __init__(self, config: Any, mixer: nn.Module, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.dropout)
        self.dropout = config.dropout

    def forward(
        self, hidden_states: Tensor, past_key_values: RecurrentCache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return the next hidden states, and the mixer's evidence if requested."""
        cached = None if past_key_values is None else past_key_values.layers[self.layer]
        state = None if cached is None else cached.state
        mixed = self.mixer(self.mixer_norm(hidden_states), state=state, **kwargs)
        if cached is not None:
            cached.update(mixed.state, hidden_states.shape[1])
        hidden_states = hidden_states + F.dropout(mixed.output, self.dropout, self.training)
        added = self.mlp(self.mlp_norm(hidden_states))
        return hidden_states + F.dropout(added, self.dropout, self.training), mixed.evidence


class RecurrentPreTrainedModel(OwnDecoder):
    """Declarations for transformers."""

    config_class = RecurrentConfig
    _no_split_modules = ["RecurrentBlock"]  # noqa: RUF012
    cache_class = RecurrentCache
    # A state cannot be rolled back, as assisted generation requires.
    _is_stateful = True


class RecurrentModel(RecurrentPreTrainedModel, OwnModel):
    """Embeddings, blocks and the last norm; padding is ignored wherever it stands in a row.

    ``mixer_of(config, layer)`` returns the mixer of a layer, which is called with ``(x, state,
    mask, starts, return_evidence)``.
    """

    mixer_of: Callable[[Any, int], nn.Module]

    def __init__(self, config: Any) -> None:
        def block(layer: int) -> RecurrentBlock:
            return RecurrentBlock(config, self.mixer_of(config, layer), layer)

        super().__init__(config, block, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.post_init()

    def _block_arguments(
        self,
        embedded: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: RecurrentCache | None,
    ) -> dict[str, Any]:
        cached = 0 if cache is None else cache.get_seq_length()
        packed = attention_mask is None and not cached
        return {
            "mask": _mask(attention_mask, embedded, cached),
            "starts": _starts(position_ids, embedded) if packed else None,
        }


def _mask(attention_mask: Tensor | None, embedded: Tensor, cached: int) -> Tensor | None:
    """Return which of the new positions are tokens, or None if all are.

    ``attention_mask`` covers the new positions, or the ``cached`` ones too.
    """
    if attention_mask is None:
        return None
    batch, length = embedded.shape[:2]
    if attention_mask.shape not in ((batch, length), (batch, cached + length)):
        raise InputError(
            f"attention_mask is {list(attention_mask.shape)}: expected [{batch}, {length}], or "
            f"[{batch}, {cached + length}] including the cache. A recurrent model takes no mask "
            "over pairs."
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
    return starts.expand(batch, -1) if bool(starts.any()) else None


@no_type_check
@strict
class DeltaNetConfig(RecurrentConfig):
    """Configuration of :class:`DeltaNetForCausalLM`, in addition to RecurrentConfig.

    Attributes:
        num_heads: H, a divisor of the hidden size.
        convolution_width: width of the convolutions on queries, keys and values.
    """

    model_type = "prismlm_deltanet"

    num_heads: int = count(default=4)
    convolution_width: int = 4


class DeltaNetModel(RecurrentModel):
    """DeltaNet without its output embedding."""

    config_class = DeltaNetConfig

    @staticmethod
    def mixer_of(config: Any, layer: int) -> DeltaMixer:  # noqa: D102
        width = config.convolution_width
        return DeltaMixer(config.hidden_size, config.num_heads, convolution_width=width)


class DeltaNetForCausalLM(RecurrentPreTrainedModel, OwnForCausalLM):
    """A language model of delta rules, RMSNorm and SwiGLU.

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), with the
    settings of ProtoT, §4.
    """

    config_class = DeltaNetConfig
    decoder_class = DeltaNetModel
