"""The base classes of this package's decoders: settings, inputs, caches, output embedding."""

# No postponed annotations: huggingface_hub checks settings by their types.
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, no_type_check

import torch
from huggingface_hub.dataclasses import as_validated_field, strict
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.utils.generic import ModelOutput, can_return_tuple

from prismlm.errors import InputError


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

    @property
    def rows(self) -> int | None:
        return next((len(leaf) for leaf in tree_leaves(self.state) if leaf is not None), None)

    def advance(self, state: Any, tokens: int) -> None:
        """Set the state after ``tokens`` more positions."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # there are no keys and values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a recurrent layer's cache has a state, not keys and values.")

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

    @property
    def rows(self) -> int | None:
        return len(self.keys) if self.get_seq_length() else None


class OwnCache(Cache):
    """The cache of a decoder; ``rows`` of a layer is its batch size, or None while empty."""

    layer_class: type[_RecurrentLayer | _ProjectionLayer]
    layers: list[Any]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[self.layer_class() for _ in range(num_layers)])

    def check(self, layers: int, batch: int) -> None:
        """Raise InputError for a model with another depth, or another batch size."""
        rows = next((layer.rows for layer in self.layers), None)
        if len(self.layers) != layers or rows not in (None, batch):
            raise InputError(
                f"the cache has {len(self.layers)} layers and {rows or 'no'} rows, and the model "
                f"{layers} layers and its input {batch} rows: give the cache that this model "
                "returned, and select or repeat its rows with batch_select_indices or "
                "batch_repeat_interleave."
            )


class RecurrentCache(OwnCache):
    """The cache of a recurrent decoder: a state per layer."""

    layer_class = _RecurrentLayer


class ProjectionCache(OwnCache):
    """The cache of a signal/noise decoder: one unrotated tensor per head and layer."""

    layer_class = _ProjectionLayer


@dataclass
class OwnOutput(ModelOutput):
    """Hugging Face's usual fields, and, if requested, evidence.

    Attributes:
        gates: each layer's evidence, of ProtoT and DeltaNet.
    """

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


class OwnModel(OwnDecoder):
    """Embeddings, blocks and the last norm.

    Blocks return hidden states and evidence. A family implements ``_block_arguments``, which
    returns for a call whether evidence is requested, and the arguments of every block.

    Attributes:
        options: names of additional arguments of a call.
    """

    options: tuple[str, ...] = ()
    _block_arguments: Callable[..., tuple[bool, dict[str, Any]]]

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
        **kwargs: Any,
    ) -> OwnOutput:
        """Run the decoder; see the language model's forward."""
        embedded = self._embed(input_ids, inputs_embeds)
        cache = self._cache_for(past_key_values, use_cache, embedded.shape[0])
        requested, arguments = self._block_arguments(
            embedded, attention_mask, position_ids, cache, kwargs
        )
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
            gates=tuple(evidence) if requested else None,
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give input_ids or inputs_embeds, and not both.")
        embedded: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if embedded.ndim != 3 or 0 in embedded.shape[:2]:
            raise InputError(
                f"the input is {list(embedded.shape[:-1])}: expected [B, T], at least one row of "
                "at least one token; a single sequence is input_ids[None]."
            )
        return embedded

    def _cache_for(
        self, cache: Cache | None, use_cache: bool | None, batch: int
    ) -> OwnCache | None:
        """Return the given cache, checked, a new one, or None.

        As in Hugging Face's decoders there is none with gradient checkpointing; a cache with
        positions is refused then, since its context would be ignored.
        """
        config = self.config
        if cache is not None and not isinstance(cache, self.cache_class):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}: models of type "
                f"{config.model_type!r} take the {self.cache_class.__name__} that they return."
            )
        if self.gradient_checkpointing and self.training:
            if cache is not None and cache.get_seq_length():
                raise InputError(
                    "past_key_values has positions, which training with gradient checkpointing "
                    "cannot use: give whole sequences, or call gradient_checkpointing_disable() or "
                    "eval()."
                )
            return None
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = self.cache_class(config.num_hidden_layers)
        if cache is not None:
            cache.check(config.num_hidden_layers, batch)
        return cache


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
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation={generation_config.cache_implementation!r}: models of type "
                f"{self.config.model_type!r} have only one kind of cache. Leave it out."
            )
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
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> OwnOutput:
        """Predict the next token at each position, as Hugging Face's decoders do.

        Args:
            attention_mask: [B, T], or [B, past + T] with a cache; 0 on padding.
            position_ids: int64 [B, T]; without a mask and with an empty cache, a new sequence
                starts wherever they do not increase by one. ProtoT and DeltaNet use them only for
                that.
            logits_to_keep: how many of the last positions, or which positions; 0 for all.
            **kwargs: ``num_items_in_batch`` of the loss; ``output_gates`` returns each layer's
                evidence, of ProtoT and DeltaNet.
        """
        options = {name: kwargs.pop(name) for name in self.model.options if name in kwargs}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **options,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        fields = dict(outputs) | {"last_hidden_state": None, "loss": loss, "logits": logits}
        return OwnOutput(**fields)
