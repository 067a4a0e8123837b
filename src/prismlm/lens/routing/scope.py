"""Where interventions hold: inside one ``with`` block, for the thread or task that entered it.

Hooks on a mixer's gates carry them out. The interventions themselves are a context variable, so
threads and asyncio tasks that share a model each see their own; hooks stand only while at least one
block is open, and do nothing for those outside of one. A model that was compiled before does not
see hooks: intervene on the plain one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prismlm.errors import InputError
from prismlm.layers import MixerEvidence, PrototypeMixer
from prismlm.layers.prototype_mixer import GateInputs, initial_prototypes
from prismlm.lens.routing.interventions import Intervention, MaskRead, MaskWrite, Reinitialise
from prismlm.lens.routing.mixers import check_channel, check_layer, mixers_of


@dataclass(frozen=True)
class _Plan:
    """What is done to one layer's gates.

    Attributes:
        channels: R.
        groups: G.
        prototypes: those drawn anew, by channel.
        write_excluded, read_excluded: channels with the score −∞.
        write_zero, read_zero: channels whose gate is set to zero.
    """

    channels: int
    groups: int
    prototypes: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    write_excluded: frozenset[int] = frozenset()
    read_excluded: frozenset[int] = frozenset()
    write_zero: frozenset[int] = frozenset()
    read_zero: frozenset[int] = frozenset()

    def then(self, inner: _Plan) -> _Plan:
        """Return the plan of both, with ``inner``'s draw where both draw one channel anew."""
        return _Plan(
            self.channels,
            self.groups,
            {**self.prototypes, **inner.prototypes},
            self.write_excluded | inner.write_excluded,
            self.read_excluded | inner.read_excluded,
            self.write_zero | inner.write_zero,
            self.read_zero | inner.read_zero,
        )


class _Standing(NamedTuple):
    blocks: int
    handles: tuple[RemovableHandle, ...]


Plans = Mapping[nn.Module, _Plan]
_NONE: Plans = {}
_plans: ContextVar[Plans] = ContextVar("prismlm_interventions", default=_NONE)
_standing: dict[nn.Module, _Standing] = {}
_lock = threading.Lock()


@contextmanager
def intervene(model: nn.Module, *interventions: Intervention) -> Iterator[None]:
    """Apply interventions to every forward pass of ``model`` in this block and context.

        with intervene(model, MaskWrite(layer=9, channel=7)):
            model.generate(ids)

    It holds with and without a cache, in batches and beams; the gates that the model returns are
    those after it. Blocks nest. A thread started inside the block has a context of its own and sees
    none of it. No intervention changes no bit.

    Source: ProtoT, A.3.

    Raises:
        InputError: the model has no prototype mixer, there is no such layer or channel, what is
            given is not an intervention, or no channel of a group is left to share its gate.
    """
    own = _planned(model, interventions)
    outer = _plans.get()
    combined = {
        gates: outer[gates].then(plan) if gates in outer else plan for gates, plan in own.items()
    }
    for plan in combined.values():
        _check_some_left(plan)
    token = _plans.set({**outer, **combined})
    for gates in own:
        _stand(gates)
    try:
        yield
    finally:
        for gates in own:
            _step_down(gates)
        _plans.reset(token)


def interventions_hold() -> bool:
    """Return whether any intervention holds in this thread or task."""
    return bool(_plans.get())


def _planned(model: nn.Module, interventions: Iterable[Intervention]) -> dict[nn.Module, _Plan]:
    mixers = mixers_of(model)
    plans: dict[nn.Module, _Plan] = {}
    for intervention in interventions:
        if not isinstance(intervention, (Reinitialise, MaskWrite, MaskRead)):
            raise InputError(
                f"{intervention!r} is not an intervention: expected Reinitialise, MaskWrite or "
                "MaskRead."
            )
        check_layer(len(mixers), intervention.layer)
        mixer = mixers[intervention.layer]
        check_channel(mixer.channels, intervention.layer, intervention.channel)
        plan = _plan_of(intervention, mixer)
        held = plans.get(mixer.gates)
        plans[mixer.gates] = plan if held is None else held.then(plan)
    return plans


def _plan_of(intervention: Intervention, mixer: PrototypeMixer) -> _Plan:
    members, none = frozenset([intervention.channel]), frozenset[int]()
    if isinstance(intervention, Reinitialise):
        drawn = {intervention.channel: _drawn(intervention, mixer)}
        return _Plan(mixer.channels, mixer.groups, drawn)
    # In the order of the fields: −∞ in the write and the read gate, then zero in both.
    place = 2 * (not intervention.renormalise) + isinstance(intervention, MaskRead)
    chosen = (members if i == place else none for i in range(4))
    return _Plan(mixer.channels, mixer.groups, {}, *chosen)


def _drawn(intervention: Reinitialise, mixer: PrototypeMixer) -> Tensor:
    parts = [intervention.seed, intervention.layer, intervention.channel]
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    generator = torch.Generator().manual_seed(seed)
    return initial_prototypes(1, mixer.prototypes.shape[1], generator)[0]


def _check_some_left(plan: _Plan) -> None:
    size = plan.channels // plan.groups
    for name, excluded in (("write", plan.write_excluded), ("read", plan.read_excluded)):
        for first in range(0, plan.channels, size):
            if excluded.issuperset(range(first, first + size)):
                of = "" if plan.groups == 1 else f" of group {first // size}"
                raise InputError(
                    f"all {size} channels{of} of a {name} gate are excluded from its softmax, so "
                    "that none is left to share it: leave one out, or mask without renormalise."
                )


def _stand(gates: nn.Module) -> None:
    with _lock:
        blocks, handles = _standing.get(gates, _Standing(0, ()))
        if not blocks:
            handles = (
                gates.register_forward_pre_hook(_before),
                gates.register_forward_hook(_after),
            )
        _standing[gates] = _Standing(blocks + 1, handles)


def _step_down(gates: nn.Module) -> None:
    with _lock:
        blocks, handles = _standing.pop(gates)
        if blocks > 1:
            _standing[gates] = _Standing(blocks - 1, handles)
            return
        for handle in handles:
            handle.remove()


def _before(module: nn.Module, args: tuple[Any, ...]) -> tuple[GateInputs] | None:
    plan = _plans.get().get(module)
    if plan is None:
        return None
    inputs: GateInputs = args[0]
    device = inputs.prototypes.device
    if plan.prototypes:
        places = torch.tensor(list(plan.prototypes), device=device)
        rows = torch.stack(list(plan.prototypes.values())).to(inputs.prototypes)
        inputs = inputs._replace(prototypes=inputs.prototypes.index_copy(0, places, rows))
    write = _flags(plan.write_excluded, plan.channels, device)
    # One tensor for both keeps shared routing shared.
    same = plan.read_excluded == plan.write_excluded
    read = write if same else _flags(plan.read_excluded, plan.channels, device)
    return (inputs._replace(write_excluded=write, read_excluded=read),)


def _after(
    module: nn.Module, args: tuple[Any, ...], evidence: MixerEvidence
) -> MixerEvidence | None:
    plan = _plans.get().get(module)
    if plan is None or not (plan.write_zero or plan.read_zero):
        return None
    zeros = (plan.write_zero, plan.read_zero)
    gates = [
        gate if not zero else gate.index_fill(-1, torch.tensor(sorted(zero), device=gate.device), 0)
        for gate, zero in zip(evidence, zeros, strict=True)
    ]
    return MixerEvidence(*gates)


def _flags(channels: frozenset[int], count: int, device: torch.device) -> Tensor | None:
    if not channels:
        return None
    flags = torch.zeros(count, dtype=torch.bool, device=device)
    flags[list(channels)] = True
    return flags
