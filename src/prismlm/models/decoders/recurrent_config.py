"""What the configurations of recurrent decoders have in common."""

from __future__ import annotations

from typing import Any, ClassVar, no_type_check

from transformers import PreTrainedConfig

from prismlm.models.decoders.recurrent_checks import check_share

INNER_MULTIPLE = 16


# Its __init__ takes keywords that its signature does not name, which jaxtyping would refuse.
@no_type_check
class RecurrentConfig(PreTrainedConfig):
    """What recurrent decoders have in common.

    Attributes:
        vocab_size: V.
        hidden_size: d.
        intermediate_size: of SwiGLU; None for 8/3 of d, rounded up to a multiple of 16.
        num_hidden_layers: blocks.
        dropout: after the token embeddings, on what mixer and SwiGLU add to the residual stream,
            and inside SwiGLU.
        rms_norm_eps: added to the mean square.
        initializer_range: standard deviation of embeddings and projections at the start.
        use_cache: whether a forward pass returns a cache unless told otherwise.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "gates"]
    state_settings: ClassVar[tuple[str, ...]] = ()
    """The settings, beside width and depth, that say what a layer's state looks like."""

    vocab_size: int = 16000
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 6
    dropout: float = 0.1
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * INNER_MULTIPLE))
            self.intermediate_size *= INNER_MULTIPLE
        super().__post_init__(**kwargs)
        # The library's own validation looks for methods in its base class only.
        self.validate_architecture()

    def validate_architecture(self) -> None:
        """Check what no model can be built from.

        Raises:
            InputError: a dropout that is no share.
        """
        check_share("dropout", self.dropout)

    @property
    def state_layout(self) -> dict[str, Any]:
        """What a cache must have been made by, for this model to go on from it."""
        names = ("model_type", "hidden_size", "num_hidden_layers", *self.state_settings)
        values = {name: getattr(self, name) for name in names}
        # A configuration that was read from a file has lists for tuples.
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
