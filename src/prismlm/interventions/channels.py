"""Interventions on the channels of prototype mixers, and the block in which they apply.

Hooks on a mixer's gates carry them out. The interventions are in a context variable, so blocks
nest. A compiled model calls no hooks.

ProtoT (A.3) reports different figures for the write mask than for the read mask. With zeros after
the softmax the two are the same ablation: the channel adds nothing to any position. So both
readings are available: zero after the softmax, and −∞ before it, after which the other channels of
the group share its part of the gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.layers import MixerEvidence, PrototypeMixer
from prismlm.layers.prototype_mixer import GateInputs, initial_prototypes
from prismlm.models.decoders.protot import check_channel, check_layer, gates_of, mixers_of
from prismlm.models.device import check_sequence
from prismlm.models.watch import Hook, watch, within

# The a(i) of a position that keeps its own gates.
OWN = -1


@dataclass(frozen=True)
class _ChannelIntervention:
    layer: int
    channel: int


@dataclass(frozen=True)
class Reinitialise(_ChannelIntervention):
    """Reinitialise a channel's prototype: p_k ~ N(0, 1/d).

    The same seed, layer and channel give the same prototype. Decay and temperature stay.
    """

    seed: int = 0


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


# The write and read gates of one text, [1, T, R] for each layer.
GateRecord = tuple[MixerEvidence, ...]


def record_gates(model: PreTrainedModel, input_ids: Int64[Tensor, " T"]) -> GateRecord:
    """Return the gates of one sequence under active interventions, for :class:`ClampGates`."""
    check_sequence(input_ids)
    return gates_of(model, input_ids[None])


@dataclass(frozen=True, eq=False)
class ClampGates:
    """Replace a text's gates by those of another text; values stay the text's own.

        write_i = recorded write_a(i),   read_i = recorded read_a(i),   a(i) ≥ 0

    Passes read one complete text with a(i) for each position, without a cache, padding or packed
    rows; all rows of a batch are clamped alike. Without an alignment a(i) = i.

    Source: ProtoT, §5.2, "Prototype clamping".
    """

    record: GateRecord
    alignment: Sequence[int] | Tensor | None = None  # a(i); −1 for a position's own gate

    def sources(self) -> Int64[Tensor, " T"]:
        """Return a(i) of each clamped position."""
        if self.alignment is None:
            return torch.arange(self.record[0].write.shape[1])
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

    @property
    def clamp(self) -> ClampGates | None:
        """The last clamp, which wins."""
        clamps = [i for i in self.interventions if isinstance(i, ClampGates)]
        return clamps[-1] if clamps else None


LayersByGates = Mapping[nn.Module, _Layer]
_NONE: LayersByGates = {}
_active: ContextVar[LayersByGates] = ContextVar("prismlm_interventions", default=_NONE)


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
    hooks += [Hook(layer.mixer, _check_pass) for layer in layers if layer.clamp is not None]
    with within(_active, active), watch(hooks, unwatched_too=True):
        yield


def _checked_layers(
    intervention: Intervention, mixers: tuple[PrototypeMixer, ...]
) -> tuple[int, ...]:
    """Return the layers of an intervention, after checking it against the model."""
    if isinstance(intervention, ClampGates):
        recorded = [gates.write.shape[-1] for gates in intervention.record]
        if [mixer.channels for mixer in mixers] != recorded:
            raise InputError("the recorded gates are of another model: record them with this one.")
        return tuple(range(len(mixers)))
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
                    "softmax: leave one out, or mask without renormalise."
                )
        if excluded and layer.clamp is not None:
            raise InputError(f"a clamped {name} gate has no softmax: mask without renormalise.")


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
    if layer.clamp is not None:
        evidence = _clamped(evidence, layer.clamp, layer.number)
    for name in MASKS:
        if channels := layer.masked(name, renormalise=False):
            gate: Tensor = getattr(evidence, name)
            gate = gate.index_fill(-1, torch.tensor(channels, device=gate.device), 0)
            evidence = evidence._replace(**{name: gate})
    return evidence


def _clamped(evidence: MixerEvidence, clamp: ClampGates, layer: int) -> MixerEvidence:
    """Return the gates of a pass with the recorded ones at clamped positions."""
    sources, recorded = clamp.sources().to(evidence.write.device), clamp.record[layer]
    own, rows = (sources < 0)[:, None], sources.clamp(min=0)
    write, read = (
        torch.where(own, gate, other[0].to(gate)[rows])
        for gate, other in zip(evidence, recorded, strict=True)
    )
    # The same tensor keeps shared gates shared.
    shared = evidence.write is evidence.read and recorded.write is recorded.read
    return MixerEvidence(write, write if shared else read)


def _check_pass(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a pass whose positions are not those of the clamp."""
    layer = _active.get().get(mixer.gates)
    if layer is None or layer.clamp is None:
        return
    state, mask, starts = map(kwargs.get, ("state", "mask", "starts"))
    read, clamped = args[0].shape[1], len(layer.clamp.sources())
    padded = mask is not None and not bool(mask.all())
    packed = starts is not None and bool(starts[:, 1:].any())
    if read != clamped or state is not None or padded or packed:
        raise InputError(
            f"a pass reads {read} positions, and the clamp has {clamped}: read one complete text "
            "of that length, without a cache, padding or packed rows."
        )
