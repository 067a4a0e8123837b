"""Interventions on the channels of prototype mixers, and the block in which they hold.

Hooks on a mixer's gates carry them out; for clamps, one on the decoder says the positions, which a
gate does not know. The interventions themselves are a context variable, so that blocks nest: the
hooks of the outermost carry out what holds. A model that was compiled before calls no hooks:
intervene on the plain one.

The source (ProtoT, A.3) masks gates and reports other figures for the write mask than for the read
mask. Set to zero after the softmax the two are one ablation: either way the channel adds nothing to
any position. So both readings are here: zero after the softmax, and −∞ before it, after which the
other channels of its group share the whole gate.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GateName = Literal["both", "write", "read"]
OWN = -1


@dataclass(frozen=True)
class _OfChannel:
    layer: int
    channel: int

    def __post_init__(self) -> None:
        check_whole("the layer", self.layer, None)
        check_whole("the channel", self.channel, None)


@dataclass(frozen=True)
class Reinitialise(_OfChannel):
    """Draw a channel's prototype anew, as the model itself starts them.

        p_k ~ N(0, 1/d)

    The same seed, layer and channel give the same prototype. Decay and temperature stay.

    Attributes:
        layer, channel: from 0.
        seed: of the draw, not negative.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("the seed of Reinitialise", self.seed)


@dataclass(frozen=True)
class MaskWrite(_OfChannel):
    """Let no position write into a channel.

        write_k = 0 after the softmax, or x·p_k / τ_w = −∞ before it, with ``renormalise``

    What a cache holds from before the block stays in the channel and decays.

    Attributes:
        layer, channel: from 0.
        renormalise: whether the other channels of its group share what this one would have had.
    """

    renormalise: bool = False


@dataclass(frozen=True)
class MaskRead(_OfChannel):
    """Let no position read from a channel.

        read_k = 0 after the softmax, or (W x)·p_k / τ_r = −∞ before it, with ``renormalise``

    A layer with shared gates then reads by another gate than it writes by.

    Attributes:
        layer, channel: from 0.
        renormalise: whether the other channels of its group share what this one would have had.
    """

    renormalise: bool = False


@dataclass(frozen=True, eq=False)
class GateRecord:
    """The gates of one text, in every layer.

    Attributes:
        input_ids: of the text, int64 [T].
        layers: write and read gates of each layer, [1, T, R].
    """

    input_ids: Int64[Tensor, " T"]
    layers: tuple[MixerEvidence, ...]


def record_gates(model: PreTrainedModel, input_ids: Int64[Tensor, " T"]) -> GateRecord:
    """Return the gates of one sequence, with what interventions hold, for :class:`ClampGates`."""
    check_sequence(input_ids)
    return GateRecord(input_ids, gates_of(model, input_ids[None]))


@dataclass(frozen=True, eq=False)
class ClampGates:
    """Give positions the gates that another text had; values stay those of the text that is read.

        write_i = recorded write_a(i),   read_i = recorded read_a(i),   a(i) ≥ 0

    Without an alignment a(i) = i, and the text must have as many tokens as the recorded one: a pass
    that runs over its end is refused, and so is a shorter one that keeps no cache to resume from.
    Positions after it, those that are generated, have their own gates. An alignment says a(i) for
    its positions; those after it have their own.

    Every row of a batch is clamped alike. Padding and packed rows are refused: a position in the
    row would not be one in the text. Shared gates are clamped together, whichever is asked for.

    Source: ProtoT, §5.2, "Prototype clamping".

    Attributes:
        record: what :func:`record_gates` gave.
        layers: which, or None for all.
        gates: ``"both"``, ``"write"`` or ``"read"``.
        alignment: a(i), a position of the recorded text or −1 for the own gate; or None.
    """

    record: GateRecord
    layers: tuple[int, ...] | None = None
    gates: GateName = "both"
    alignment: Sequence[int] | Tensor | None = None

    def __post_init__(self) -> None:
        check_choice("the gates of a clamp", self.gates, get_args(GateName))
        recorded, sources = len(self.record.input_ids), self.sources()
        whole = sources.ndim == 1 and sources.numel() > 0 and not sources.is_floating_point()
        if not whole or not OWN <= int(sources.min()) <= int(sources.max()) < recorded:
            raise InputError(
                f"the alignment of a clamp is {self.alignment}: expected a position for each "
                f"token; the recorded text has 0 to {recorded - 1}, and −1 leaves a token its own "
                "gates."
            )

    def sources(self) -> Int64[Tensor, " T"]:
        """Return a(i) of each position that the clamp speaks of."""
        if self.alignment is None:
            return torch.arange(len(self.record.input_ids))
        return torch.as_tensor(self.alignment)


Intervention = Reinitialise | MaskWrite | MaskRead | ClampGates
MASKS = {"write": MaskWrite, "read": MaskRead}


class _Layer(NamedTuple):
    """A layer with the interventions that hold there, in the order given."""

    number: int
    mixer: PrototypeMixer
    interventions: tuple[Intervention, ...] = ()

    def masked(self, gate: str, *, renormalise: bool) -> list[int]:
        """Return the channels with the score −∞, or else those set to zero."""
        kind = MASKS[gate]
        masks: list[Any] = [one for one in self.interventions if isinstance(one, kind)]
        return sorted({one.channel for one in masks if one.renormalise == renormalise})

    def clamps(self) -> list[tuple[ClampGates, GateName]]:
        """Return clamps, each with the gates that it is of; shared gates are one."""
        clamps = [one for one in self.interventions if isinstance(one, ClampGates)]
        return [(one, "both" if self.mixer.shared_gates else one.gates) for one in clamps]


ByGates = Mapping[nn.Module, _Layer]
_NONE: ByGates = {}
_in_force: ContextVar[ByGates] = ContextVar("prismlm_interventions", default=_NONE)
# How many positions a decoder has read before the pass under way, and how many it reads now.
_span: ContextVar[tuple[int, int] | None] = ContextVar("prismlm_clamped_span", default=None)


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
    for intervention in interventions:
        for number in _layers(intervention, mixers):
            mixer = mixers[number]
            layer = held.get(mixer.gates, _Layer(number, mixer))
            held[mixer.gates] = layer._replace(interventions=(*layer.interventions, intervention))
    here = [held[mixer.gates] for mixer in mixers if mixer.gates in held]
    for layer in here:
        _check(layer)
    hooks = [Hook(layer.mixer.gates, _before, _after) for layer in here]
    if any(isinstance(one, ClampGates) for one in interventions):
        decoders = [module for module in model.modules() if isinstance(module, RecurrentModel)]
        hooks += [Hook(decoder, _note_span, _forget_span, always=True) for decoder in decoders]
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
        own = [mixer.channels for mixer in mixers]
        given = [gates.write.shape[-1] for gates in intervention.record.layers]
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


def _drawn(intervention: Reinitialise, width: int) -> Tensor:
    parts = [intervention.seed, intervention.layer, intervention.channel]
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    return initial_prototypes(1, width, torch.Generator().manual_seed(seed))[0]


def _flags(channels: list[int], count: int, device: torch.device) -> Tensor | None:
    if not channels:
        return None
    flags = torch.zeros(count, dtype=torch.bool, device=device)
    flags[channels] = True
    return flags


def _after(
    module: nn.Module, args: Any, kwargs: Any, evidence: MixerEvidence
) -> MixerEvidence | None:
    layer = _in_force.get().get(module)
    if layer is None:
        return None
    for clamp, gates in layer.clamps():
        evidence = _clamped(evidence, clamp, layer.number, gates)
    zeros = [layer.masked(name, renormalise=False) for name in MASKS]
    if not any(zeros):
        return evidence
    gates = [
        gate if not zero else gate.index_fill(-1, torch.tensor(zero, device=gate.device), 0)
        for gate, zero in zip(evidence, zeros, strict=True)
    ]
    return MixerEvidence(*gates)


def _clamped(
    evidence: MixerEvidence, clamp: ClampGates, layer: int, gates: GateName
) -> MixerEvidence:
    """Return the gates of the pass under way with those of a clamp in their places."""
    span = _span.get()
    if span is None:
        raise InputError(
            "gates are clamped by position, and only the decoder knows that: run the model, not a "
            "layer of it."
        )
    first, length = span
    sources = torch.full((length,), OWN)
    known = clamp.sources()[first : first + length]
    sources[: len(known)] = known
    sources = sources.to(evidence.write.device)
    recorded = clamp.record.layers[layer]

    def replaced(own: Tensor, other: Tensor) -> Tensor:
        taken = other[0].to(own)[sources.clamp(min=0)]
        return torch.where((sources >= 0)[:, None], taken, own)

    write, read = (
        replaced(own, other) if gates in ("both", name) else own
        for name, own, other in zip(MASKS, evidence, recorded, strict=True)
    )
    # One tensor for both keeps shared gates shared.
    shared = evidence.write is evidence.read and recorded.write is recorded.read
    return MixerEvidence(write, write if shared else read)


def _note_span(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note which positions a decoder is about to read; refuse those that no clamp fits."""
    given = inspect.signature(decoder.forward).bind_partial(*args, **kwargs).arguments.get
    inputs = given("inputs_embeds") if given("input_ids") is None else given("input_ids")
    if inputs is None or inputs.ndim < 2:
        # The decoder itself says what is wrong with them.
        return
    past, mask, positions = map(given, ("past_key_values", "attention_mask", "position_ids"))
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
    use_cache = given("use_cache")
    has_cache = past is not None or (decoder.config.use_cache if use_cache is None else use_cache)
    first, length = 0 if past is None else int(past.get_seq_length()), inputs.shape[1]
    last, held = first + length, _in_force.get()
    layers = [held[mixer.gates] for mixer in mixers_of(decoder) if mixer.gates in held]
    for clamp in {clamp for layer in layers for clamp, _ in layer.clamps()}:
        recorded = len(clamp.record.input_ids)
        fits = last == recorded or (last < recorded and has_cache) or first >= recorded
        if clamp.alignment is None and not fits:
            raise InputError(
                f"a pass reads positions {first} to {last - 1} and the recorded text has "
                f"{recorded} tokens: texts must have equally many, or the clamp needs an alignment."
            )
    _span.set((first, length))


def _forget_span(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    _span.set(None)
