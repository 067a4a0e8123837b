"""What this package's own decoders share: their inputs, their caches, their output embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from prismlm.errors import InputError

logger: Any = logging.get_logger(__name__)


class OwnDecoder(PreTrainedModel):
    """A decoder, with or without its output embedding, whose layers keep a cache of their own.

    Attributes:
        cache_class: of what a forward pass with ``use_cache`` returns; made of a number of layers.
        cache_form: what the cache holds, in words.
    """

    if TYPE_CHECKING:
        config: Any
        embed_tokens: nn.Embedding
        gradient_checkpointing: bool
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012 (the library's own declaration)
    cache_class: type[Any] = Cache
    cache_form: str = ""

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return the embeddings of a call, [B, T, d].

        Raises:
            InputError: neither or both of input ids and embeddings, another shape, or no token.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give input_ids or inputs_embeds, and not both.")
        if input_ids is not None and input_ids.ndim != 2:
            raise InputError(
                f"input_ids are {list(input_ids.shape)}: expected [B, T]; one sequence by itself "
                "is input_ids[None]."
            )
        if inputs_embeds is not None and inputs_embeds.ndim != 3:
            raise InputError(f"inputs_embeds are {list(inputs_embeds.shape)}: expected [B, T, d].")
        embedded: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if 0 in embedded.shape[:2]:
            raise InputError(
                f"the input is {list(embedded.shape[:2])}: expected at least one row, and at least "
                "one token in a row."
            )
        return embedded

    def _cache_of_call(self, given: Cache | None, use_cache: bool | None) -> Any:
        """Return the cache that a call goes on from and returns, a new one, or None.

        While blocks are computed a second time there is none, as in Hugging Face's decoders, which
        warn once and go on without what they were given. Here that is refused where it holds
        something: what follows would be predicted without its context.

        Raises:
            InputError: a cache of another kind, or one that holds something under gradient
                checkpointing.
        """
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if given is not None and not isinstance(given, self.cache_class):
            raise InputError(
                f"past_key_values is a {type(given).__name__}: models of type "
                f"{self.config.model_type!r} take the {self.cache_class.__name__} that they return."
            )
        if self.gradient_checkpointing and self.training:
            held = 0 if given is None else given.get_seq_length()
            if held:
                raise InputError(
                    f"past_key_values holds {held} positions, and training with gradient "
                    "checkpointing computes every block twice, which a cache does not survive: "
                    "give whole sequences, or call gradient_checkpointing_disable() or eval()."
                )
            if given is not None or use_cache:
                logger.warning_once(
                    "use_cache=True is incompatible with gradient checkpointing in training. "
                    "Setting use_cache=False."
                )
            return None
        if given is None and use_cache:
            return self.cache_class(self.config.num_hidden_layers)
        return given


class LanguageModelMixin:
    """What makes a language model of a decoder in ``model`` and an embedding in ``lm_head``.

    A class names GenerationMixin behind this one.
    """

    if TYPE_CHECKING:
        config: Any
        model: Any
        lm_head: nn.Linear
        loss_function: Any
        cache_class: type[Any]
        cache_form: str

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation={generation_config.cache_implementation!r}: "
                f"{self.cache_form} has one form only. Leave it out."
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.cache_class(self.config.num_hidden_layers)
            return None
        parent: Any = super()
        return parent._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )

    def _predict(
        self,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        loss_arguments: dict[str, Any],
        **inputs: Any,
    ) -> Any:
        """Run the decoder and its output embedding.

        Args:
            labels: int64 [B, T], −100 where nothing is to be predicted; shifted by the loss.
            logits_to_keep: how many of the last positions, or which positions, get logits; 0 for
                all.
            loss_arguments: what else the loss takes.
            **inputs: of the decoder.

        Returns:
            The decoder's output with ``logits``, and ``loss`` if there are labels, and without
            ``last_hidden_state``.
        """
        outputs = self.model(**inputs, return_dict=True)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss_arguments
            )
        found = dict(outputs) | {"last_hidden_state": None, "loss": loss, "logits": logits}
        return type(outputs)(**found)
