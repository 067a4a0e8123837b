"""Where interventions hold: inside one ``with`` block, for the thread or task that entered it.

Hooks on a mixer's gates carry them out; for clamps, one on the decoder says the positions. The
interventions themselves are a context variable, so that blocks nest: the hooks of the outermost
carry out what holds. A model that was compiled before calls no hooks: intervene on the plain one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prismlm.edits.channels.clamp import (
    ClampGates,
    LayerClamp,
    clamped,
    forget_span,
    layer_clamp,
    note_span,
)
from prismlm.edits.channels.interventions import Intervention, MaskRead, MaskWrite, Reinitialise
from prismlm.errors import InputError
from prismlm.layers import MixerEvidence, PrototypeMixer
from prismlm.layers.mixer_gates import GateInputs
from prismlm.layers.prototype_mixer import initial_prototypes
from prismlm.models.decoders.mixers import check_channel, check_layer, chosen_layers, mixers_of
from prismlm.models.decoders.recurrent_decoder import RecurrentModel
from prismlm.models.watch import Hook, watch


@dataclass(frozen=True)
class _LayerIntervention:
    """What is done to one layer's gates.

    Attributes:
        channels: R.
        groups: G.
        prototypes: those drawn anew, by channel.
        masked: the gate, whether its score is −∞ or else the gate zero, and the channel.
        clamps: recorded gates, in the order in which they take the place of the model's own.
    """

    channels: int
    groups: int
    prototypes: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    masked: frozenset[tuple[str, bool, int]] = frozenset()
    clamps: tuple[LayerClamp, ...] = ()

    def excluded(self, gate: str) -> list[int]:
        """The channels with the score −∞ in a gate, ascending."""
        return sorted(k for name, excluded, k in self.masked if name == gate and excluded)

    def zero(self, gate: str) -> list[int]:
        """The channels of a gate that are set to zero, ascending."""
        return sorted(k for name, excluded, k in self.masked if name == gate and not excluded)

    def then(self, inner: _LayerIntervention) -> _LayerIntervention:
        """Return both, with ``inner``'s draw where both draw one channel anew."""
        return _LayerIntervention(
            self.channels,
            self.groups,
            {**self.prototypes, **inner.prototypes},
            self.masked | inner.masked,
            self.clamps + inner.clamps,
        )


ByGates = Mapping[nn.Module, _LayerIntervention]
_NONE: ByGates = {}
_in_force: ContextVar[ByGates] = ContextVar("prismlm_interventions", default=_NONE)


@contextmanager
def intervene(model: nn.Module, *interventions: Intervention) -> Iterator[None]:
    """Apply interventions to every forward pass of ``model`` in this block and context.

        with intervene(model, MaskWrite(layer=9, channel=7)):
            model.generate(ids)

    It holds with and without a cache, in batches and beams; the gates that the model returns are
    those after it. Blocks nest. A thread started inside the block has a context of its own and sees
    none of it. No intervention changes no bit.

    In one layer the order is: prototypes drawn anew and scores of −∞, then clamps, the last given
    last, then gates set to zero.

    Source: ProtoT, A.3; for clamps §5.2.

    Raises:
        InputError: the model has no prototype mixer, there is no such layer or channel, what is
            given is not an intervention, no channel of a group is left to share its gate, or a gate
            is both clamped and renormalised. Inside the block: a pass that a clamp does not fit.
    """
    own = _by_gates(model, interventions)
    outer = _in_force.get()
    combined = {
        gates: outer[gates].then(wanted) if gates in outer else wanted
        for gates, wanted in own.items()
    }
    for wanted in combined.values():
        _check(wanted)
    decoders = _decoders(model, own.values())
    hooks = [Hook(module, note_span, forget_span, always=True) for module in decoders]
    hooks += [Hook(gates, _before, _after) for gates in own]
    token = _in_force.set({**outer, **combined})
    try:
        with watch(hooks, unwatched_too=True):
            yield
    finally:
        _in_force.reset(token)


def interventions_hold() -> bool:
    """Return whether any intervention holds in this thread or task."""
    return bool(_in_force.get())


def _by_gates(
    model: nn.Module, interventions: Iterable[Intervention]
) -> dict[nn.Module, _LayerIntervention]:
    mixers = mixers_of(model)
    by_gates: dict[nn.Module, _LayerIntervention] = {}
    for intervention in interventions:
        for layer, wanted in _by_layer(intervention, mixers):
            gates = mixers[layer].gates
            held = by_gates.get(gates)
            by_gates[gates] = wanted if held is None else held.then(wanted)
    return by_gates


def _by_layer(
    intervention: Intervention, mixers: tuple[PrototypeMixer, ...]
) -> Iterator[tuple[int, _LayerIntervention]]:
    """Yield an intervention's layers with what it does there."""
    if isinstance(intervention, ClampGates):
        recorded = len(intervention.record.layers)
        if recorded != len(mixers):
            raise InputError(
                f"the model has {len(mixers)} layers and the recorded gates {recorded}: record "
                "it with the model that it is clamped onto."
            )
        for layer in chosen_layers(len(mixers), intervention.layers):
            clamp = layer_clamp(intervention, layer, mixers[layer])
            size = mixers[layer].channels, mixers[layer].groups
            yield layer, _LayerIntervention(*size, clamps=(clamp,))
        return
    if not isinstance(intervention, (Reinitialise, MaskWrite, MaskRead)):
        raise InputError(
            f"{intervention!r} is not an intervention: expected Reinitialise, MaskWrite, MaskRead "
            "or ClampGates."
        )
    check_layer(len(mixers), intervention.layer)
    mixer = mixers[intervention.layer]
    check_channel(mixer.channels, intervention.layer, intervention.channel)
    yield intervention.layer, _on_channel(intervention, mixer)


def _on_channel(
    intervention: Reinitialise | MaskWrite | MaskRead, mixer: PrototypeMixer
) -> _LayerIntervention:
    if isinstance(intervention, Reinitialise):
        drawn = {intervention.channel: _drawn(intervention, mixer)}
        return _LayerIntervention(mixer.channels, mixer.groups, drawn)
    gate = "read" if isinstance(intervention, MaskRead) else "write"
    masked = frozenset([(gate, intervention.renormalise, intervention.channel)])
    return _LayerIntervention(mixer.channels, mixer.groups, masked=masked)


def _decoders(model: nn.Module, layers: Iterable[_LayerIntervention]) -> tuple[nn.Module, ...]:
    """Return what says positions, if a clamp asks for them."""
    if not any(wanted.clamps for wanted in layers):
        return ()
    found = tuple(module for module in model.modules() if isinstance(module, RecurrentModel))
    if not found:
        raise InputError(
            "gates are clamped by position, and only a decoder knows that: give the model, not a "
            "layer of it."
        )
    return found


def _drawn(intervention: Reinitialise, mixer: PrototypeMixer) -> Tensor:
    parts = [intervention.seed, intervention.layer, intervention.channel]
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    generator = torch.Generator().manual_seed(seed)
    return initial_prototypes(1, mixer.prototypes.shape[1], generator)[0]


def _check(wanted: _LayerIntervention) -> None:
    size = wanted.channels // wanted.groups
    for name in ("write", "read"):
        excluded = set(wanted.excluded(name))
        for first in range(0, wanted.channels, size):
            if excluded.issuperset(range(first, first + size)):
                of = "" if wanted.groups == 1 else f" of group {first // size}"
                raise InputError(
                    f"all {size} channels{of} of a {name} gate are excluded from its softmax, so "
                    "that none is left to share it: leave one out, or mask without renormalise."
                )
        if excluded and any(getattr(clamp, name) is not None for clamp in wanted.clamps):
            raise InputError(
                f"a {name} gate is clamped, which leaves it no softmax to exclude channel "
                f"{min(excluded)} from: mask without renormalise, or do not clamp its layer."
            )


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wanted = _in_force.get().get(module)
    if wanted is None:
        return None
    inputs: GateInputs = args[0]
    device = inputs.prototypes.device
    if wanted.prototypes:
        places = torch.tensor(list(wanted.prototypes), device=device)
        rows = torch.stack(list(wanted.prototypes.values())).to(inputs.prototypes)
        inputs = inputs._replace(prototypes=inputs.prototypes.index_copy(0, places, rows))
    excluded = wanted.excluded("write"), wanted.excluded("read")
    write = _flags(excluded[0], wanted.channels, device)
    # One tensor for both keeps shared gates shared.
    read = write if excluded[0] == excluded[1] else _flags(excluded[1], wanted.channels, device)
    return (inputs._replace(write_excluded=write, read_excluded=read),), kwargs


def _after(
    module: nn.Module, args: Any, kwargs: Any, evidence: MixerEvidence
) -> MixerEvidence | None:
    wanted = _in_force.get().get(module)
    zeros = [] if wanted is None else [wanted.zero("write"), wanted.zero("read")]
    if wanted is None or not (any(zeros) or wanted.clamps):
        return None
    for clamp in wanted.clamps:
        evidence = clamped(evidence, clamp)
    if not any(zeros):
        return evidence
    gates = [
        gate if not zero else gate.index_fill(-1, torch.tensor(zero, device=gate.device), 0)
        for gate, zero in zip(evidence, zeros, strict=True)
    ]
    return MixerEvidence(*gates)


def _flags(channels: list[int], count: int, device: torch.device) -> Tensor | None:
    if not channels:
        return None
    flags = torch.zeros(count, dtype=torch.bool, device=device)
    flags[channels] = True
    return flags
