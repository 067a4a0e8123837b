"""ProtoT: a decoder in which prototype channels carry all communication along the sequence."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import initialization as init

from prismlm.layers import PrototypeMixer
from prismlm.models.recurrent_config import RecurrentConfig
from prismlm.models.recurrent_decoder import (
    RecurrentForCausalLM,
    RecurrentModel,
    RecurrentPreTrainedModel,
)


class ProtoTConfig(RecurrentConfig):
    """Configuration of :class:`ProtoTForCausalLM`; the defaults are the source's.

    Source: ProtoT, §3, §4 and A.7. Beside the fields of :class:`RecurrentConfig`:

    Attributes:
        num_channels: R, prototypes and channels of each layer.
        value_width: D; None for half of the hidden size.
        temperature: τ of both gates at the start.
        temperature_mode: ``divide`` or ``multiply`` scores by τ.
        shared_routing_layers: layers that read by their write gate.
        shared_routing_temperature: τ of these layers at the start.
        convolution_layers: layers with a convolution on the values.
        convolution_width: positions that it mixes.
        mass_normalisation: whether sums are divided by their mass.
        decay: β of every channel at the start.
        alpha: α of every layer at the start.
        paper_parameter_layout: also hold, frozen, what the source's Table 13 counts although
            nothing uses it: W and τ_r in layers with shared routing, and convolutions in every
            layer.
    """

    model_type = "prismlm_protot"

    state_settings: ClassVar[tuple[str, ...]] = (
        "num_channels",
        "value_width",
        "convolution_layers",
        "convolution_width",
    )

    num_channels: int = 32
    value_width: int | None = None
    temperature: float = 1.0
    temperature_mode: Literal["divide", "multiply"] = "divide"
    shared_routing_layers: list[int] | tuple[int, ...] = (0,)
    shared_routing_temperature: float = 3.0
    convolution_layers: list[int] | tuple[int, ...] = (0, 1)
    convolution_width: int = 5
    mass_normalisation: bool = True
    decay: float = 0.95
    alpha: float = 1.0
    paper_parameter_layout: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.value_width is None:
            self.value_width = self.hidden_size // 2
        super().__post_init__(**kwargs)


class ProtoTPreTrainedModel(RecurrentPreTrainedModel):
    """Initialisation of prototype mixers."""

    config_class = ProtoTConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PrototypeMixer):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)


class ProtoTModel(ProtoTPreTrainedModel, RecurrentModel):
    """ProtoT without its output embedding."""

    def mixer_of(self, config: ProtoTConfig, layer: int) -> PrototypeMixer:
        """Return a layer's prototype mixer."""
        shared = layer in config.shared_routing_layers
        return PrototypeMixer(
            config.hidden_size,
            config.num_channels,
            value_width=config.value_width,
            shared_routing=shared,
            temperature=config.shared_routing_temperature if shared else config.temperature,
            temperature_mode=config.temperature_mode,
            convolution_width=config.convolution_width if layer in config.convolution_layers else 0,
            normalise=config.mass_normalisation,
            decay=config.decay,
            alpha=config.alpha,
            keep_unused=config.paper_parameter_layout,
        )


class ProtoTForCausalLM(ProtoTPreTrainedModel, RecurrentForCausalLM):
    """A language model of prototype mixers, RMSNorm and SwiGLU.

        h ← h + dropout(mixer(RMSNorm(h))),   h ← h + dropout(SwiGLU(RMSNorm(h)))

    Time and memory of a generated token do not depend on how much came before it. With
    ``output_routing`` a forward pass returns each layer's gates, :class:`MixerEvidence`.

    Source: ProtoT, §3, §4 and A.7.
    """

    decoder_class = ProtoTModel
