"""Clamping the gates of one text onto another: gates that were recorded, in place of own ones.

While a clamp holds, position i of a pass writes and reads by the gates that position
``alignment[i]`` of the recorded text had; values stay those of the text that is read.

A gate does not know its position, so the decoder's own inputs say it: how much its cache has seen,
and how many positions come now.

Source: ProtoT, §5.2, "Prototype clamping".
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice
from prismlm.layers import MixerEvidence
from prismlm.models.decoders.mixers import gates_of
from prismlm.models.positions import check_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GateName = Literal["both", "write", "read"]
OWN = -1


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
    """Give positions the gates that another text had.

        write_i = recorded write_a(i),   read_i = recorded read_a(i),   a(i) ≥ 0

    Without an alignment a(i) = i, and the text must have as many tokens as the recorded one: a pass
    that runs over its end is refused, and so is a shorter one that keeps no cache to go on with.
    Positions after it, those that are generated, have their own gates. An alignment says a(i) for
    its positions; those after it have their own.

    Every row of a batch is clamped alike. Padding and packed rows are refused: a position in the
    row would not be one in the text. Shared gates are clamped together, whichever is asked for.

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


class PositionSpan(NamedTuple):
    """Which positions a decoder is about to read.

    Attributes:
        first: how many came before.
        length: how many come.
        has_cache: whether a later pass can go on from this one.
        obstacle: why positions in the row are not positions in a text, or None.
    """

    first: int
    length: int
    has_cache: bool
    obstacle: str | None


_span: ContextVar[PositionSpan | None] = ContextVar("prismlm_clamped_span", default=None)


def clamped(
    evidence: MixerEvidence, clamp: ClampGates, layer: int, gates: GateName
) -> MixerEvidence:
    """Return the gates of the pass under way with those of a clamp in their places."""
    span = _span.get()
    if span is None:
        raise InputError(
            "gates are clamped by position, and only the decoder knows that: run the model, not a "
            "layer of it."
        )
    _check(span, clamp)
    own = torch.full((span.length,), OWN)
    known = clamp.sources()[span.first : span.first + span.length]
    own[: len(known)] = known
    sources = own.to(evidence.write.device)
    recorded = clamp.record.layers[layer]
    write, read = (
        own_gate if gates not in ("both", name) else _replaced(own_gate, gate[0], sources)
        for name, own_gate, gate in zip(("write", "read"), evidence, recorded, strict=True)
    )
    # One tensor for both keeps shared gates shared.
    shared = evidence.write is evidence.read and recorded.write is recorded.read
    return MixerEvidence(write, write if shared else read)


def _replaced(gate: Tensor, recorded: Tensor, sources: Tensor) -> Tensor:
    taken = recorded.to(gate)[sources.clamp(min=0)]
    return torch.where((sources >= 0)[:, None], taken, gate)


def _check(span: PositionSpan, clamp: ClampGates) -> None:
    if span.obstacle is not None:
        raise InputError(f"gates cannot be clamped onto {span.obstacle}.")
    last, length = span.first + span.length, len(clamp.record.input_ids)
    fits = last == length or (last < length and span.has_cache) or span.first >= length
    if clamp.alignment is None and not fits:
        raise InputError(
            f"a pass reads positions {span.first} to {last - 1} and the recorded text has {length} "
            "tokens: texts must have equally many, or the clamp needs an alignment."
        )


def note_span(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note which positions a decoder is about to read: a forward pre-hook with keywords."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get
    inputs = given("inputs_embeds") if given("input_ids") is None else given("input_ids")
    if inputs is None or inputs.ndim < 2:
        # The decoder itself says what is wrong with them.
        return
    past, mask, positions = map(given, ("past_key_values", "attention_mask", "position_ids"))
    use_cache = given("use_cache")
    has_cache = module.config.use_cache if use_cache is None else use_cache  # pyright: ignore
    packed = positions is not None and bool((positions.diff(dim=-1) != 1).any())
    obstacle = None
    if mask is not None and not bool(mask.all()):
        obstacle = (
            "a batch with padding: a position in the row would not be one in the text. Give rows "
            "of one length, or one row"
        )
    elif packed and past is None and mask is None:
        obstacle = "rows that hold several sequences: give one sequence a row"
    first = 0 if past is None else int(past.get_seq_length())
    _span.set(PositionSpan(first, inputs.shape[1], past is not None or bool(has_cache), obstacle))


def forget_span(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Note that a decoder has read: a forward hook."""
    _span.set(None)
