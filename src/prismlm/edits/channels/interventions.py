"""Interventions on channels, as values; :func:`intervene` applies them.

Source: ProtoT, A.3. The source masks gates and reports other figures for the write mask than for
the read mask. Set to zero after the softmax the two are one ablation: either way the channel adds
nothing to any position. So both readings are here: zero after the softmax, and −∞ before it, after
which the other channels of its group share the whole gate.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from prismlm.edits.channels.clamp import ClampGates
from prismlm.errors import InputError


@dataclass(frozen=True)
class Reinitialise:
    """Draw a channel's prototype anew, as the model itself starts them.

        p_k ~ N(0, 1/d)

    The same seed, layer and channel give the same prototype. Decay and temperature stay.

    Attributes:
        layer: from 0.
        channel: from 0.
        seed: of the draw, not negative.

    Raises:
        InputError: numbers that are not integers, or a negative seed.
    """

    layer: int
    channel: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_place(self.layer, self.channel)
        _check_integer(self.seed, "a seed")
        if self.seed < 0:
            raise InputError(f"Reinitialise has the seed {self.seed}: expected 0 or more.")


@dataclass(frozen=True)
class MaskWrite:
    """Let no position write into a channel.

        write_k = 0 after the softmax, or x·p_k / τ_w = −∞ before it, with ``renormalise``

    What a cache holds from before the block stays in the channel and decays.

    Attributes:
        layer: from 0.
        channel: from 0.
        renormalise: whether the other channels of its group share what this one would have had.

    Raises:
        InputError: numbers that are not integers.
    """

    layer: int
    channel: int
    renormalise: bool = False

    def __post_init__(self) -> None:
        _check_place(self.layer, self.channel)


@dataclass(frozen=True)
class MaskRead:
    """Let no position read from a channel.

        read_k = 0 after the softmax, or (W x)·p_k / τ_r = −∞ before it, with ``renormalise``

    A layer with shared gates then reads by another gate than it writes by.

    Attributes:
        layer: from 0.
        channel: from 0.
        renormalise: whether the other channels of its group share what this one would have had.

    Raises:
        InputError: numbers that are not integers.
    """

    layer: int
    channel: int
    renormalise: bool = False

    def __post_init__(self) -> None:
        _check_place(self.layer, self.channel)


Intervention = Reinitialise | MaskWrite | MaskRead | ClampGates


def _check_place(layer: object, channel: object) -> None:
    _check_integer(layer, "the number of a layer")
    _check_integer(channel, "the number of a channel")


def _check_integer(value: object, name: str) -> None:
    try:
        operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise InputError(f"{value!r} is not {name}: expected an integer of 0 or more.") from None
