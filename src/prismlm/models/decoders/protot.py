"""ProtoT: a decoder in which prototype channels carry all communication along the sequence."""

# No postponed annotations: huggingface_hub checks settings by the types themselves.
from typing import Any, Literal, no_type_check

from huggingface_hub.dataclasses import strict

from prismlm.errors import InputError
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.own_decoder import count, finite
from prismlm.models.decoders.recurrent_decoder import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentModel,
)


@no_type_check
@strict
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

    num_channels: int = count(default=32)
    value_width: int | None = None
    gate_temperature: float | int = 1.0
    temperature_mode: Literal["divide", "multiply"] = "divide"
    shared_gate_layers: list[int] | tuple[int, ...] = (0,)
    shared_gate_temperature: float | int = 3.0
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
        """Raise InputError for what would build another model than was meant."""
        for name in ("shared_gate_layers", "convolution_layers"):
            layers, default = getattr(self, name), getattr(type(self), name)
            known = all(0 <= layer < self.num_hidden_layers for layer in layers)
            # A model of one layer has the defaults of deeper ones too, as its checkpoints say.
            if not known and tuple(layers) != default:
                raise InputError(
                    f"{name} is {layers!r}: expected a list of layers from 0 to "
                    f"{self.num_hidden_layers - 1}; [] for none."
                )
        given = self.initial_temperatures
        if given is not None and len(given) != self.num_hidden_layers:
            raise InputError(
                f"initial_temperatures has {len(given)} figures: expected one for each of the "
                f"{self.num_hidden_layers} layers."
            )
        if former := [name for name in vars(self) if "routing" in name]:
            raise InputError(f"{former[0]} has 'gate' for 'routing' in its name now: rename it.")

    def initial_temperature(self, layer: int) -> float:
        """Return τ of a layer at the start."""
        if self.initial_temperatures is not None:
            return self.initial_temperatures[layer]
        shared = layer in self.shared_gate_layers
        return self.shared_gate_temperature if shared else self.gate_temperature


def _mixer_of(config: ProtoTConfig, layer: int) -> PrototypeMixer:
    return PrototypeMixer(
        config.hidden_size,
        config.num_channels,
        value_width=config.value_width,
        shared_gates=layer in config.shared_gate_layers,
        temperature=config.initial_temperature(layer),
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


class ProtoTModel(RecurrentModel):
    """ProtoT without its output embedding."""

    config_class = ProtoTConfig
    mixer_of = staticmethod(_mixer_of)


class ProtoTForCausalLM(RecurrentForCausalLM):
    """A language model of prototype mixers, RMSNorm and SwiGLU.

        h ← h + dropout(mixer(RMSNorm(h))),   h ← h + dropout(SwiGLU(RMSNorm(h)))

    Time and memory of a generated token do not depend on how much came before it. With
    ``output_gates`` a forward pass returns each layer's gates, :class:`MixerEvidence`.

    Source: ProtoT, §3, §4 and A.7.
    """

    config_class = ProtoTConfig
    decoder_class = ProtoTModel
