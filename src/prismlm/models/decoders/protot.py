"""ProtoT: a decoder with prototype mixers; finding those mixers in a model."""

# No postponed annotations: huggingface_hub checks settings by their types.
import math
from collections.abc import Iterable
from typing import Any, Literal, no_type_check

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.layers import MixerEvidence, PrototypeMixer
from prismlm.models.decoders.own_decoder import (
    OwnForCausalLM,
    RecurrentConfig,
    RecurrentModel,
    RecurrentPreTrainedModel,
    count,
    finite,
    positive,
)
from prismlm.models.seam import lacks, run_decoder


@no_type_check
@strict
class ProtoTConfig(RecurrentConfig):
    """Configuration of :class:`ProtoTForCausalLM`; defaults as in ProtoT, §3, §4 and A.7.

    In addition to :class:`RecurrentConfig`:

    Attributes:
        num_channels: R, prototypes and channels of each layer.
        value_width: D; None for half of the hidden size.
        gate_temperature: initial τ of both gates.
        temperature_mode: ``divide`` or ``multiply`` scores by τ.
        shared_gate_layers: layers whose read gate is their write gate.
        shared_gate_temperature: initial τ of these layers.
        initial_temperatures: initial τ by layer, instead of both.
        convolution_layers: layers with a convolution on the values.
        convolution_width: its width in positions.
        mass_normalisation: whether sums are divided by their mass.
        decay: initial β of every channel.
        decay_half_lives: lowest and highest initial half-life in positions, instead of ``decay``;
            the channels of a group are spaced logarithmically between them.
        num_groups: G; each group of R / G channels has separate gates over D / G of the values.
        decay_mode: ``channel``, as in the source, or ``token`` for β_jk = σ(γ_k + δ_k·x_j).
        alpha: initial α of every layer.
        paper_parameter_layout: also include the unused, frozen parameters that Table 13 counts: W
            and τ_r in layers with shared gates, and convolutions in every layer.
    """

    model_type = "prismlm_protot"

    num_channels: int = count(default=32)
    value_width: int | None = count(default=None)
    gate_temperature: float | int = positive(default=1.0)
    temperature_mode: Literal["divide", "multiply"] = "divide"
    shared_gate_layers: list[int] | tuple[int, ...] = (0,)
    shared_gate_temperature: float | int = positive(default=3.0)
    initial_temperatures: list[float | int] | tuple[float | int, ...] | None = None
    convolution_layers: list[int] | tuple[int, ...] = (0, 1)
    convolution_width: int = 5
    mass_normalisation: bool = True
    decay: float | int = 0.95
    decay_half_lives: list[float | int] | tuple[float | int, ...] | None = None
    decay_mode: Literal["channel", "token"] = "channel"
    num_groups: int = count(default=1)
    alpha: float | int = finite(default=1.0)
    paper_parameter_layout: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.value_width is None:
            self.value_width = self.hidden_size // 2
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Raise InputError for settings that would silently build another model."""
        for name in ("shared_gate_layers", "convolution_layers"):
            layers, default = getattr(self, name), getattr(type(self), name)
            known = all(0 <= layer < self.num_hidden_layers for layer in layers)
            # Models of one layer have the same defaults.
            if not known and tuple(layers) != default:
                raise InputError(
                    f"{name} is {layers!r}: expected a list of layers from 0 to "
                    f"{self.num_hidden_layers - 1}; [] for none."
                )
        depth, temperatures = self.num_hidden_layers, self.initial_temperatures
        if temperatures is not None and len(temperatures) != depth:
            raise InputError(
                f"initial_temperatures are {list(temperatures)}: expected one for each of the "
                f"{depth} layers."
            )
        if former := [name for name in vars(self) if "routing" in name]:
            raise InputError(f"{former[0]} has 'gate' for 'routing' in its name now: rename it.")

    def initial_temperature(self, layer: int) -> float:
        """Return the initial τ of a layer."""
        if self.initial_temperatures is not None:
            return self.initial_temperatures[layer]
        shared = layer in self.shared_gate_layers
        return self.shared_gate_temperature if shared else self.gate_temperature


class ProtoTModel(RecurrentModel):
    """ProtoT without its output embedding."""

    config_class = ProtoTConfig

    @staticmethod
    def mixer_of(config: Any, layer: int) -> PrototypeMixer:  # noqa: D102
        convolution = layer in config.convolution_layers
        return PrototypeMixer(
            config.hidden_size,
            config.num_channels,
            value_width=config.value_width,
            shared_gates=layer in config.shared_gate_layers,
            temperature=config.initial_temperature(layer),
            temperature_mode=config.temperature_mode,
            convolution_width=config.convolution_width if convolution else 0,
            normalise=config.mass_normalisation,
            decay=config.decay,
            decay_half_lives=config.decay_half_lives,
            alpha=config.alpha,
            groups=config.num_groups,
            decay_mode=config.decay_mode,
            keep_unused=config.paper_parameter_layout,
        )


class ProtoTForCausalLM(RecurrentPreTrainedModel, OwnForCausalLM):
    """A language model of prototype mixers, RMSNorm and SwiGLU (ProtoT, §3, §4 and A.7).

    Time and memory of a generated token do not depend on the length before it. With
    ``output_gates`` a forward pass returns each layer's gates, :class:`MixerEvidence`.
    """

    config_class = ProtoTConfig
    decoder_class = ProtoTModel


def has_mixers(model: nn.Module) -> bool:
    """Return whether a model has a prototype mixer."""
    return any(isinstance(module, PrototypeMixer) for module in model.modules())


def mixers_of(model: nn.Module) -> tuple[PrototypeMixer, ...]:
    """Return the mixer of each layer, first to last; raise InputError if there is none."""
    mixers = tuple(module for module in model.modules() if isinstance(module, PrototypeMixer))
    if not mixers:
        raise lacks(model, "prototype mixer and channels, as 'prismlm_protot' has them")
    return mixers


def chosen_layers(count: int, layers: Iterable[int] | None) -> tuple[int, ...]:
    """Return ``layers``, checked, or all of ``count``."""
    chosen = tuple(range(count)) if layers is None else tuple(layers)
    for layer in chosen:
        check_layer(count, layer)
    return chosen


def check_layer(count: int, layer: int) -> None:
    """Raise InputError unless 0 ≤ layer < count."""
    if not 0 <= layer < count:
        raise InputError(f"there is no layer {layer}: the model's layers are 0 to {count - 1}.")


def check_channel(channels: int, layer: int, channel: int) -> None:
    """Raise InputError unless 0 ≤ channel < channels."""
    if not 0 <= channel < channels:
        raise InputError(
            f"there is no channel {channel} in layer {layer}: expected 0 to {channels - 1}."
        )


def half_life(decay: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return −ln 2 / ln β, in positions (ProtoT, §5.1); float64."""
    return -math.log(2) / decay.double().log()


def half_lives(model: nn.Module) -> tuple[Float[Tensor, " R"], ...]:
    """Return the half-life of every channel, in positions, layer by layer; float64 on the CPU."""
    mixers = mixers_of(model)
    if any(mixer.decay_map is not None for mixer in mixers):
        raise InputError(
            "the decays of this model depend on the token (decay_mode='token'), so its channels "
            "have no fixed half-life: read_channels(model, ids) has those over a text."
        )
    return tuple(half_life(mixer.decay.detach().cpu()) for mixer in mixers)


@torch.no_grad()
def gates_of(
    model: nn.Module, input_ids: Int64[Tensor, "B T"], mask: Tensor | None = None
) -> tuple[MixerEvidence, ...]:
    """Return the gates of each layer from one forward pass without logits."""
    mixers_of(model)
    return run_decoder(model, input_ids, mask, output_gates=True).gates
