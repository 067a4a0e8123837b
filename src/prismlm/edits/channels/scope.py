"""Where interventions hold: inside one ``with`` block, for the thread or task that entered it.

Hooks on a mixer's gates carry them out; for clamps, one on the decoder says the positions. The
interventions themselves are a context variable, so that blocks nest: the hooks of the outermost
carry out what holds. A model that was compiled before calls no hooks: intervene on the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        prototypes: those drawn anew, by channel.
        masked: the gate, whether its score is −∞ or else the gate zero, and the channel.
        clamps: recorded gates, in the order in which they take the place of the model's own.
    """

    prototypes: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    masked: frozenset[tuple[str, bool, int]] = frozenset()
    clamps: tuple[LayerClamp, ...] = ()

    def channels(self, *, excluded: bool) -> tuple[list[int], list[int]]:
        """The channels of the write and the read gate with the score −∞, or set to zero."""
        write, read = (
            sorted(k for name, score, k in self.masked if (name, score) == (gate, excluded))
            for gate in ("write", "read")
        )
        return write, read

    def then(self, inner: _LayerIntervention) -> _LayerIntervention:
        """Return both, with ``inner``'s draw where both draw one channel anew."""
        prototypes = {**self.prototypes, **inner.prototypes}
        masked, clamps = self.masked | inner.masked, self.clamps + inner.clamps
        return _LayerIntervention(prototypes, masked, clamps)


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
    mixers, outer = mixers_of(model), _in_force.get()
    combined: dict[nn.Module, _LayerIntervention] = {}
    clamping = False
    for intervention in interventions:
        for layer, wanted in _by_layer(intervention, mixers):
            gates = mixers[layer].gates
            clamping |= bool(wanted.clamps)
            held = combined.get(gates, outer.get(gates))
            combined[gates] = wanted if held is None else held.then(wanted)
    for mixer in mixers:
        if mixer.gates in combined:
            _check(mixer, combined[mixer.gates])
    decoders = _decoders(model) if clamping else ()
    hooks = [Hook(module, note_span, forget_span, always=True) for module in decoders]
    hooks += [Hook(gates, _before, _after) for gates in combined]
    token = _in_force.set({**outer, **combined})
    try:
        with watch(hooks, unwatched_too=True):
            yield
    finally:
        _in_force.reset(token)


def interventions_hold() -> bool:
    """Return whether any intervention holds in this thread or task."""
    return bool(_in_force.get())


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
            yield layer, _LayerIntervention(clamps=(clamp,))
        return
    if not isinstance(intervention, (Reinitialise, MaskWrite, MaskRead)):
        raise InputError(
            f"{intervention!r} is not an intervention: expected Reinitialise, MaskWrite, MaskRead "
            "or ClampGates."
        )
    layer, channel = intervention.layer, intervention.channel
    check_layer(len(mixers), layer)
    check_channel(mixers[layer].channels, layer, channel)
    if isinstance(intervention, Reinitialise):
        yield layer, _LayerIntervention({channel: _drawn(intervention, mixers[layer])})
        return
    gate = "read" if isinstance(intervention, MaskRead) else "write"
    masked = frozenset([(gate, intervention.renormalise, channel)])
    yield layer, _LayerIntervention(masked=masked)


def _decoders(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return what says positions to clamps."""
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


def _check(mixer: PrototypeMixer, wanted: _LayerIntervention) -> None:
    size = mixer.channels // mixer.groups
    for name, excluded in zip(("write", "read"), wanted.channels(excluded=True), strict=True):
        for first in range(0, mixer.channels, size):
            if set(excluded).issuperset(range(first, first + size)):
                of = "" if mixer.groups == 1 else f" of group {first // size}"
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
    excluded, count = wanted.channels(excluded=True), len(inputs.prototypes)
    write = _flags(excluded[0], count, device)
    # One tensor for both keeps shared gates shared.
    read = write if excluded[0] == excluded[1] else _flags(excluded[1], count, device)
    return (inputs._replace(write_excluded=write, read_excluded=read),), kwargs


def _after(
    module: nn.Module, args: Any, kwargs: Any, evidence: MixerEvidence
) -> MixerEvidence | None:
    wanted = _in_force.get().get(module)
    if wanted is None:
        return None
    for clamp in wanted.clamps:
        evidence = clamped(evidence, clamp)
    zeros = wanted.channels(excluded=False)
    if not any(zeros):
        return evidence if wanted.clamps else None
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
