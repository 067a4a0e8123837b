"""Interventions on the channels of prototype mixers, and the block in which they apply.

Hooks on a mixer's gates carry them out; for clamps, a hook on the decoder provides the positions.
The interventions are in a context variable, so blocks nest. A compiled model calls no hooks.

ProtoT (A.3) reports different figures for the write mask than for the read mask. With zeros after
the softmax the two are the same ablation: the channel adds nothing to any position. So both
readings are available: zero after the softmax, and −∞ before it, after which the other channels of
the group share its part of the gate.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.errors import InputError, check_choice, check_whole
from prismlm.layers import MixerEvidence, PrototypeMixer
from prismlm.layers.mixer_gates import GateInputs
from prismlm.layers.prototype_mixer import initial_prototypes
from prismlm.models.decoders.protot import (
    check_channel,
    check_layer,
    chosen_layers,
    gates_of,
    mixers_of,
)
from prismlm.models.decoders.recurrent_decoder import RecurrentModel
from prismlm.models.device import check_sequence
from prismlm.models.watch import Hook, watch

GateName = Literal["both", "write", "read"]
OWN = -1


@dataclass(frozen=True)
class _ChannelIntervention:
    layer: int
    channel: int

    def __post_init__(self) -> None:
        check_whole("the layer", self.layer, None)
        check_whole("the channel", self.channel, None)


@dataclass(frozen=True)
class Reinitialise(_ChannelIntervention):
    """Reinitialise a channel's prototype: p_k ~ N(0, 1/d).

    The same seed, layer and channel give the same prototype. Decay and temperature stay.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("the seed of Reinitialise", self.seed)


@dataclass(frozen=True)
class MaskWrite(_ChannelIntervention):
    """Prevent all writes into a channel.

        write_k = 0 after the softmax, or x·p_k / τ_w = −∞ before it, with ``renormalise``

    What a cache contains from before the block stays in the channel and decays.
    """

    renormalise: bool = False


@dataclass(frozen=True)
class MaskRead(_ChannelIntervention):
    """Prevent all reads from a channel.

        read_k = 0 after the softmax, or (W x)·p_k / τ_r = −∞ before it, with ``renormalise``

    A layer with shared gates then reads by another gate than it writes by.
    """

    renormalise: bool = False


@dataclass(frozen=True, eq=False)
class GateRecord:
    """The write and read gates of one text, [1, T, R] for each layer."""

    input_ids: Int64[Tensor, " T"]
    layers: tuple[MixerEvidence, ...]


def record_gates(model: PreTrainedModel, input_ids: Int64[Tensor, " T"]) -> GateRecord:
    """Return the gates of one sequence under active interventions, for :class:`ClampGates`."""
    check_sequence(input_ids)
    return GateRecord(input_ids, gates_of(model, input_ids[None]))


@dataclass(frozen=True, eq=False)
class ClampGates:
    """Replace a text's gates by those of another text; values stay the text's own.

        write_i = recorded write_a(i),   read_i = recorded read_a(i),   a(i) ≥ 0

    Without an alignment a(i) = i, and both texts must have the same length: passes that cross its
    end are refused, and so are shorter ones without a cache. Later (generated) positions keep their
    own gates. All rows of a batch are clamped alike; padding and packed rows are refused, because
    their positions differ from those in the text. Shared gates are always clamped together.

    Source: ProtoT, §5.2, "Prototype clamping".
    """

    record: GateRecord
    layers: tuple[int, ...] | None = None  # None for all
    gates: GateName = "both"
    alignment: Sequence[int] | Tensor | None = None  # a(i); −1 for a position's own gate

    def __post_init__(self) -> None:
        check_choice("the gates of a clamp", self.gates, get_args(GateName))
        recorded, sources = len(self.record.input_ids), self.sources()
        valid = sources.ndim == 1 and sources.numel() > 0 and not sources.is_floating_point()
        if not valid or not OWN <= int(sources.min()) <= int(sources.max()) < recorded:
            raise InputError(
                f"the alignment of a clamp is {self.alignment}: expected a position for each "
                f"token; the recorded text has 0 to {recorded - 1}, and −1 leaves a token its own "
                "gates."
            )

    def sources(self) -> Int64[Tensor, " T"]:
        """Return a(i) of each clamped position."""
        if self.alignment is None:
            return torch.arange(len(self.record.input_ids))
        return torch.as_tensor(self.alignment)


Intervention = Reinitialise | MaskWrite | MaskRead | ClampGates
MASKS = {"write": MaskWrite, "read": MaskRead}


class _Layer(NamedTuple):
    """A layer and its interventions, in order."""

    number: int
    mixer: PrototypeMixer
    interventions: tuple[Intervention, ...] = ()

    def masked(self, gate: str, *, renormalise: bool) -> list[int]:
        """Return the channels with the score −∞ (``renormalise``), or those set to zero."""
        masks: list[Any] = [i for i in self.interventions if isinstance(i, MASKS[gate])]
        return sorted({mask.channel for mask in masks if mask.renormalise == renormalise})

    def clamps(self) -> list[tuple[ClampGates, GateName]]:
        """Return clamps, each with its gates; shared gates count as both."""
        clamps = [i for i in self.interventions if isinstance(i, ClampGates)]
        return [(clamp, "both" if self.mixer.shared_gates else clamp.gates) for clamp in clamps]


LayersByGates = Mapping[nn.Module, _Layer]
_NONE: LayersByGates = {}
_active: ContextVar[LayersByGates] = ContextVar("prismlm_interventions", default=_NONE)
# Positions that a decoder has read before the current pass, and those in it.
_span: ContextVar[tuple[int, int] | None] = ContextVar("prismlm_clamped_span", default=None)


@contextmanager
def intervene(model: nn.Module, *interventions: Intervention) -> Iterator[None]:
    """Apply interventions to every forward pass of ``model`` in this block and context.

        with intervene(model, MaskWrite(layer=9, channel=7)):
            model.generate(ids)

    They apply with and without a cache, in batches and beams; the gates that the model returns are
    the changed ones. Blocks nest; a thread started inside has its own context, without them.

    The order in a layer is: reinitialised prototypes and scores of −∞, then clamps (the last one
    wins), then gates set to zero.
    """
    mixers, active = mixers_of(model), dict(_active.get())
    for intervention in interventions:
        for number in _checked_layers(intervention, mixers):
            mixer = mixers[number]
            layer = active.get(mixer.gates, _Layer(number, mixer))
            active[mixer.gates] = layer._replace(interventions=(*layer.interventions, intervention))
    layers = [active[mixer.gates] for mixer in mixers if mixer.gates in active]
    for layer in layers:
        _check(layer)
    hooks = [Hook(layer.mixer.gates, _change_inputs, _change_gates) for layer in layers]
    if any(isinstance(intervention, ClampGates) for intervention in interventions):
        decoders = [module for module in model.modules() if isinstance(module, RecurrentModel)]
        hooks += [Hook(decoder, _set_span, _reset_span, always=True) for decoder in decoders]
    token = _active.set(active)
    try:
        with watch(hooks, unwatched_too=True):
            yield
    finally:
        _active.reset(token)


def _checked_layers(
    intervention: Intervention, mixers: tuple[PrototypeMixer, ...]
) -> tuple[int, ...]:
    """Return the layers of an intervention, after checking it against the model."""
    if isinstance(intervention, ClampGates):
        channels = [mixer.channels for mixer in mixers]
        recorded = [gates.write.shape[-1] for gates in intervention.record.layers]
        if channels != recorded:
            raise InputError(
                f"the model has {len(channels)} layers and the recorded gates {len(recorded)}, of "
                f"{sum(channels)} and {sum(recorded)} channels: record it with the model that it "
                "is clamped onto."
            )
        return chosen_layers(len(mixers), intervention.layers)
    if not isinstance(intervention, (Reinitialise, MaskWrite, MaskRead)):
        raise InputError(
            f"{intervention!r} is not an intervention: expected Reinitialise, MaskWrite, MaskRead "
            "or ClampGates."
        )
    layer = intervention.layer
    check_layer(len(mixers), layer)
    check_channel(mixers[layer].channels, layer, intervention.channel)
    return (layer,)


def _check(layer: _Layer) -> None:
    groups, size = layer.mixer.groups, layer.mixer.channels // layer.mixer.groups
    for name in MASKS:
        excluded = layer.masked(name, renormalise=True)
        for group in range(groups):
            if set(excluded).issuperset(range(group * size, (group + 1) * size)):
                raise InputError(
                    f"all {size} channels of group {group} of a {name} gate are excluded from its "
                    "softmax, so that none is left to share it: leave one out, or mask without "
                    "renormalise."
                )
        if excluded and any(gates in ("both", name) for _, gates in layer.clamps()):
            raise InputError(
                f"a {name} gate is clamped, which leaves it no softmax to exclude channel "
                f"{min(excluded)} from: mask without renormalise, or do not clamp its layer."
            )


def _change_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layer = _active.get().get(module)
    if layer is None:
        return None
    inputs: GateInputs = args[0]
    device, (count, width) = inputs.prototypes.device, inputs.prototypes.shape
    for i in layer.interventions:
        if isinstance(i, Reinitialise):
            seed = int(np.random.SeedSequence([i.seed, i.layer, i.channel]).generate_state(1)[0])
            row = initial_prototypes(1, width, torch.Generator().manual_seed(seed))
            channel = torch.tensor([i.channel], device=device)
            prototypes = inputs.prototypes.index_copy(0, channel, row.to(inputs.prototypes))
            inputs = inputs._replace(prototypes=prototypes)

    def excluded(gate: str) -> Tensor | None:
        channels = layer.masked(gate, renormalise=True)
        none = torch.zeros(count, dtype=torch.bool, device=device)
        return none.index_fill(0, torch.tensor(channels, device=device), 1) if channels else None

    write, read = excluded("write"), excluded("read")
    if layer.masked("write", renormalise=True) == layer.masked("read", renormalise=True):
        read = write  # the same tensor keeps shared gates shared
    return (inputs._replace(write_excluded=write, read_excluded=read),), kwargs


def _change_gates(
    module: nn.Module, args: Any, kwargs: Any, evidence: MixerEvidence
) -> MixerEvidence | None:
    layer = _active.get().get(module)
    if layer is None:
        return None
    for clamp, gates in layer.clamps():
        evidence = _clamped(evidence, clamp, layer.number, gates)
    for name in MASKS:
        if channels := layer.masked(name, renormalise=False):
            gate: Tensor = getattr(evidence, name)
            gate = gate.index_fill(-1, torch.tensor(channels, device=gate.device), 0)
            evidence = evidence._replace(**{name: gate})
    return evidence


def _clamped(
    evidence: MixerEvidence, clamp: ClampGates, layer: int, gates: GateName
) -> MixerEvidence:
    """Return the gates of the current pass with the recorded ones at clamped positions."""
    span = _span.get()
    if span is None:
        raise InputError(
            "gates are clamped by position, and only the decoder knows that: run the model, not a "
            "layer of it."
        )
    first, length = span
    sources = clamp.sources()[first : first + length]
    sources = nn.functional.pad(sources, (0, length - len(sources)), value=OWN)
    sources = sources.to(evidence.write.device)
    recorded = clamp.record.layers[layer]

    def clamped(gate: Tensor, other: Tensor) -> Tensor:
        values = other[0].to(gate)[sources.clamp(min=0)]
        return torch.where((sources >= 0)[:, None], values, gate)

    write, read = (
        clamped(gate, other) if gates in ("both", name) else gate
        for name, gate, other in zip(MASKS, evidence, recorded, strict=True)
    )
    # The same tensor keeps shared gates shared.
    shared = evidence.write is evidence.read and recorded.write is recorded.read
    return MixerEvidence(write, write if shared else read)


def _set_span(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set the positions that a decoder is about to read; refuse those that no clamp fits."""
    argument = inspect.signature(decoder.forward).bind_partial(*args, **kwargs).arguments.get
    ids = argument("input_ids")
    inputs = argument("inputs_embeds") if ids is None else ids
    if inputs is None or inputs.ndim < 2:
        return  # the decoder itself raises an error
    past, mask, positions = map(argument, ("past_key_values", "attention_mask", "position_ids"))
    if mask is not None and not bool(mask.all()):
        raise InputError(
            "gates cannot be clamped onto a batch with padding: a position in the row would not be "
            "one in the text. Give rows of one length, or one row."
        )
    packed = positions is not None and bool((positions.diff(dim=-1) != 1).any())
    if packed and past is None and mask is None:
        raise InputError(
            "gates cannot be clamped onto rows that hold several sequences: give one sequence a "
            "row."
        )
    use_cache = argument("use_cache")
    has_cache = past is not None or (decoder.config.use_cache if use_cache is None else use_cache)
    first, length = 0 if past is None else int(past.get_seq_length()), inputs.shape[1]
    last, active = first + length, _active.get()
    layers = [active[mixer.gates] for mixer in mixers_of(decoder) if mixer.gates in active]
    for clamp in {clamp for layer in layers for clamp, _ in layer.clamps()}:
        recorded = len(clamp.record.input_ids)
        fits = last == recorded or (last < recorded and has_cache) or first >= recorded
        if clamp.alignment is None and not fits:
            raise InputError(
                f"a pass reads positions {first} to {last - 1} and the recorded text has "
                f"{recorded} tokens: texts must have equally many, or the clamp needs an alignment."
            )
    _span.set((first, length))


def _reset_span(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    _span.set(None)
