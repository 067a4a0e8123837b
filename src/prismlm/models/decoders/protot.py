"""ProtoT: a decoder in which prototype channels carry all communication along the sequence."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, no_type_check

from prismlm.errors import InputError, check_choice, check_number
from prismlm.layers import PrototypeMixer
from prismlm.layers.prototype_mixer import DECAY_MODES, TEMPERATURE_MODES
from prismlm.models.decoders.recurrent_decoder import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentModel,
    check_layers,
)

# Hugging Face's configurations take unknown settings in silence, and would build another model.
FORMER_NAMES = {
    "routing_temperature": "gate_temperature",
    "shared_routing_layers": "shared_gate_layers",
    "shared_routing_temperature": "shared_gate_temperature",
}


@no_type_check
class ProtoTConfig(RecurrentConfig):
    """Configuration of :class:`ProtoTForCausalLM`; the defaults are the source's.

    Source: ProtoT, §3, §4 and A.7. Beside the fields of :class:`RecurrentConfig`:

    Attributes:
        num_channels: R, prototypes and channels of each layer.
        value_width: D; None for half of the hidden size.
        gate_temperature: τ of both gates at the start.
        temperature_mode: ``divide`` or ``multiply`` scores by τ.
        shared_gate_layers: layers that read by their write gate.
        shared_gate_temperature: τ of these layers at the start.
        initial_temperatures: τ at the start, layer by layer, in place of both; None for those.
        convolution_layers: layers with a convolution on the values.
        convolution_width: positions that it mixes.
        mass_normalisation: whether sums are divided by their mass.
        decay: β of every channel at the start.
        decay_half_lives: the half-lives in positions, in place of ``decay``, over which the
            channels of a group spread evenly in their logarithm at the start; None for ``decay``.
        num_groups: G; each group of R / G channels has gates of its own over D / G of the values.
        decay_mode: ``channel``, as in the source, or ``token``, where β_jk = σ(γ_k + δ_k·x_j) also
            depends on the position.
        alpha: α of every layer at the start.
        paper_parameter_layout: also hold, frozen, what the source's Table 13 counts although
            nothing uses it: W and τ_r in layers with shared gates, and convolutions in every
            layer.
    """

    model_type = "prismlm_protot"

    state_settings: ClassVar[tuple[str, ...]] = (
        "num_channels",
        "num_groups",
        "value_width",
        "convolution_layers",
        "convolution_width",
    )

    num_channels: int = 32
    value_width: int | None = None
    gate_temperature: float = 1.0
    temperature_mode: Literal["divide", "multiply"] = "divide"
    shared_gate_layers: list[int] | tuple[int, ...] = (0,)
    shared_gate_temperature: float = 3.0
    initial_temperatures: list[float] | tuple[float, ...] | None = None
    convolution_layers: list[int] | tuple[int, ...] = (0, 1)
    convolution_width: int = 5
    mass_normalisation: bool = True
    decay: float = 0.95
    decay_half_lives: list[float] | tuple[float, ...] | None = None
    decay_mode: Literal["channel", "token"] = "channel"
    num_groups: int = 1
    alpha: float = 1.0
    paper_parameter_layout: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.value_width is None:
            self.value_width = self.hidden_size // 2
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check what no model can be built from, or another one than was meant.

        Raises:
            InputError: a mode that there is not, a layer that the model does not have, an α that is
                not finite, a dropout that is no share, or a setting by its former name.
        """
        super().validate_architecture()
        for former, name in FORMER_NAMES.items():
            if hasattr(self, former):
                raise InputError(f"{former} is called {name} now: rename it in config.json.")
        check_choice("temperature_mode", self.temperature_mode, TEMPERATURE_MODES)
        check_choice("decay_mode", self.decay_mode, DECAY_MODES)
        check_number("alpha", self.alpha, "a finite number")
        for name in ("shared_gate_layers", "convolution_layers"):
            default = getattr(type(self), name)
            check_layers(name, getattr(self, name), self.num_hidden_layers, default)


class ProtoTModel(RecurrentModel):
    """ProtoT without its output embedding."""

    config_class = ProtoTConfig

    def mixer_of(self, config: ProtoTConfig, layer: int) -> PrototypeMixer:
        """Return a layer's prototype mixer."""
        shared = layer in config.shared_gate_layers
        return PrototypeMixer(
            config.hidden_size,
            config.num_channels,
            value_width=config.value_width,
            shared_gates=shared,
            temperature=_initial_temperature(config, layer),
            temperature_mode=config.temperature_mode,
            convolution_width=config.convolution_width if layer in config.convolution_layers else 0,
            normalise=config.mass_normalisation,
            decay=config.decay,
            decay_half_lives=config.decay_half_lives,
            alpha=config.alpha,
            groups=config.num_groups,
            decay_mode=config.decay_mode,
            keep_unused=config.paper_parameter_layout,
        )


class ProtoTForCausalLM(RecurrentForCausalLM):
    """A language model of prototype mixers, RMSNorm and SwiGLU.

        h ← h + dropout(mixer(RMSNorm(h))),   h ← h + dropout(SwiGLU(RMSNorm(h)))

    Time and memory of a generated token do not depend on how much came before it. With
    ``output_gates`` a forward pass returns each layer's gates, :class:`MixerEvidence`.

    Source: ProtoT, §3, §4 and A.7.
    """

    config_class = ProtoTConfig
    decoder_class = ProtoTModel


def _initial_temperature(config: ProtoTConfig, layer: int) -> float:
    given = config.initial_temperatures
    if given is None:
        shared = layer in config.shared_gate_layers
        return config.shared_gate_temperature if shared else config.gate_temperature
    if len(given) != config.num_hidden_layers:
        raise InputError(
            f"initial_temperatures has {len(given)} figures: expected one for each of the "
            f"{config.num_hidden_layers} layers."
        )
    return given[layer]
