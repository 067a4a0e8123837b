"""DeltaNet: the linear-attention baseline that ProtoT is compared with."""

from __future__ import annotations

from typing import ClassVar, no_type_check

from prismlm.errors import InputError
from prismlm.layers.delta_mixer import DeltaMixer
from prismlm.models.decoders.recurrent_decoder import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentModel,
)


@no_type_check
class DeltaNetConfig(RecurrentConfig):
    """Configuration of :class:`DeltaNetForCausalLM`, beside the fields of RecurrentConfig.

    Attributes:
        num_heads: H, a divisor of the hidden size.
        convolution_width: positions that the convolutions on queries, keys and values mix.
    """

    model_type = "prismlm_deltanet"

    state_settings: ClassVar[tuple[str, ...]] = ("num_heads", "convolution_width")

    num_heads: int = 4
    convolution_width: int = 4

    def validate_architecture(self) -> None:
        """Check what no model can be built from.

        Raises:
            InputError: heads that do not divide the width, or a dropout that is no share.
        """
        super().validate_architecture()
        if self.num_heads < 1 or self.hidden_size % self.num_heads:
            raise InputError(
                f"num_heads is {self.num_heads}: expected a divisor of hidden_size, which is "
                f"{self.hidden_size}."
            )


class DeltaNetModel(RecurrentModel):
    """DeltaNet without its output embedding."""

    config_class = DeltaNetConfig

    def mixer_of(self, config: DeltaNetConfig, layer: int) -> DeltaMixer:
        """Return a layer's mixer."""
        return DeltaMixer(
            config.hidden_size, config.num_heads, convolution_width=config.convolution_width
        )


class DeltaNetForCausalLM(RecurrentForCausalLM):
    """A language model of delta rules, RMSNorm and SwiGLU.

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), in the
    setting of ProtoT, §4.
    """

    config_class = DeltaNetConfig
    decoder_class = DeltaNetModel
