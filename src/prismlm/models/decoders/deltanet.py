"""DeltaNet: the linear-attention baseline that ProtoT is compared with."""

# No postponed annotations: huggingface_hub checks settings by the types themselves.
from typing import no_type_check

from huggingface_hub.dataclasses import strict

from prismlm.layers.delta_mixer import DeltaMixer
from prismlm.models.decoders.own_decoder import count
from prismlm.models.decoders.recurrent_decoder import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentModel,
)


@no_type_check
@strict
class DeltaNetConfig(RecurrentConfig):
    """Configuration of :class:`DeltaNetForCausalLM`, beside the fields of RecurrentConfig.

    Attributes:
        num_heads: H, a divisor of the hidden size.
        convolution_width: positions that the convolutions on queries, keys and values mix.
    """

    model_type = "prismlm_deltanet"

    num_heads: int = count(default=4)
    convolution_width: int = 4


def _mixer_of(config: DeltaNetConfig, layer: int) -> DeltaMixer:
    width = config.convolution_width
    return DeltaMixer(config.hidden_size, config.num_heads, convolution_width=width)


class DeltaNetModel(RecurrentModel):
    """DeltaNet without its output embedding."""

    config_class = DeltaNetConfig
    mixer_of = staticmethod(_mixer_of)


class DeltaNetForCausalLM(RecurrentForCausalLM):
    """A language model of delta rules, RMSNorm and SwiGLU.

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), in the
    setting of ProtoT, §4.
    """

    config_class = DeltaNetConfig
    decoder_class = DeltaNetModel
