"""Where interventions hold: inside one ``with`` block, for the thread or task that entered it.

Hooks on a mixer's gates carry them out; for clamps, one on the decoder says the positions. The
interventions themselves are a context variable, so that blocks nest: the hooks of the outermost
carry out what holds. A model that was compiled before calls no hooks: intervene on the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.interventions.channels.clamp import (
    ClampGates,
    GateName,
    clamped,
    forget_span,
    note_span,
)
from prismlm.interventions.channels.interventions import (
    Intervention,
    MaskRead,
    MaskWrite,
    Reinitialise,
)
from prismlm.layers import MixerEvidence, PrototypeMixer
from prismlm.layers.mixer_gates import GateInputs
from prismlm.layers.prototype_mixer import initial_prototypes
from prismlm.models.decoders.mixers import check_channel, check_layer, chosen_layers, mixers_of
from prismlm.models.decoders.recurrent_decoder import RecurrentModel
from prismlm.models.watch import Hook, watch

MASKS = {"write": MaskWrite, "read": MaskRead}


class _Layer(NamedTuple):
    """A layer with the interventions that hold there, in the order given."""

    number: int
    mixer: PrototypeMixer
    interventions: tuple[Intervention, ...]

    def masked(self, gate: str, *, renormalise: bool) -> list[int]:
        """Return the channels with the score −∞, or else those set to zero."""
        return sorted(
            {
                one.channel
                for one in self.interventions
                if isinstance(one, (MaskWrite, MaskRead))
                and isinstance(one, MASKS[gate])
                and one.renormalise == renormalise
            }
        )

    def clamps(self) -> list[tuple[ClampGates, GateName]]:
        """Return clamps, each with the gates that it is of; shared gates are one."""
        clamps = [one for one in self.interventions if isinstance(one, ClampGates)]
        return [(one, "both" if self.mixer.shared_gates else one.gates) for one in clamps]


ByGates = Mapping[nn.Module, _Layer]
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
    mixers, held = mixers_of(model), dict(_in_force.get())
    hooks: list[Hook] = []
    if any(isinstance(one, ClampGates) for one in interventions):
        decoders = [module for module in model.modules() if isinstance(module, RecurrentModel)]
        hooks += [Hook(module, note_span, forget_span, always=True) for module in decoders]
    for intervention in interventions:
        for number in _layers(intervention, mixers):
            mixer = mixers[number]
            before = held[mixer.gates].interventions if mixer.gates in held else ()
            held[mixer.gates] = _Layer(number, mixer, (*before, intervention))
    here = [held[mixer.gates] for mixer in mixers if mixer.gates in held]
    for layer in here:
        _check(layer)
    hooks += [Hook(layer.mixer.gates, _before, _after) for layer in here]
    token = _in_force.set(held)
    try:
        with watch(hooks, unwatched_too=True):
            yield
    finally:
        _in_force.reset(token)


def interventions_hold() -> bool:
    """Return whether any intervention holds in this thread or task."""
    return bool(_in_force.get())


def _layers(intervention: Intervention, mixers: tuple[PrototypeMixer, ...]) -> tuple[int, ...]:
    """Return the layers that an intervention is about, which fit it."""
    if isinstance(intervention, ClampGates):
        recorded = intervention.record.layers
        own, given = ([m.channels for m in mixers], [gate.write.shape[-1] for gate in recorded])
        if own != given:
            raise InputError(
                f"the model has {len(own)} layers and the recorded gates {len(given)}, of "
                f"{sum(own)} and {sum(given)} channels: record it with the model that it is "
                "clamped onto."
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


def _drawn(intervention: Reinitialise, width: int) -> Tensor:
    parts = [intervention.seed, intervention.layer, intervention.channel]
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    return initial_prototypes(1, width, torch.Generator().manual_seed(seed))[0]


def _check(layer: _Layer) -> None:
    size = layer.mixer.channels // layer.mixer.groups
    for name in MASKS:
        excluded = layer.masked(name, renormalise=True)
        for group in range(layer.mixer.groups):
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


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layer = _in_force.get().get(module)
    if layer is None:
        return None
    inputs: GateInputs = args[0]
    device, (count, width) = inputs.prototypes.device, inputs.prototypes.shape
    drawn = {
        one.channel: _drawn(one, width)
        for one in layer.interventions
        if isinstance(one, Reinitialise)
    }
    if drawn:
        places = torch.tensor(list(drawn), device=device)
        rows = torch.stack(list(drawn.values())).to(inputs.prototypes)
        inputs = inputs._replace(prototypes=inputs.prototypes.index_copy(0, places, rows))
    excluded = [layer.masked(name, renormalise=True) for name in MASKS]
    write = _flags(excluded[0], count, device)
    # One tensor for both keeps shared gates shared.
    read = write if excluded[0] == excluded[1] else _flags(excluded[1], count, device)
    return (inputs._replace(write_excluded=write, read_excluded=read),), kwargs


def _after(
    module: nn.Module, args: Any, kwargs: Any, evidence: MixerEvidence
) -> MixerEvidence | None:
    layer = _in_force.get().get(module)
    if layer is None:
        return None
    for clamp, gates in layer.clamps():
        evidence = clamped(evidence, clamp, layer.number, gates)
    zeros = [layer.masked(name, renormalise=False) for name in MASKS]
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
