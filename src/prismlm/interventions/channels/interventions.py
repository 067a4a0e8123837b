"""Interventions on channels, as values; :func:`intervene` applies them.

Source: ProtoT, A.3. The source masks gates and reports other figures for the write mask than for
the read mask. Set to zero after the softmax the two are one ablation: either way the channel adds
nothing to any position. So both readings are here: zero after the softmax, and −∞ before it, after
which the other channels of its group share the whole gate.
"""

from __future__ import annotations

from dataclasses import dataclass

from prismlm.errors import check_whole
from prismlm.interventions.channels.clamp import ClampGates


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


Intervention = Reinitialise | MaskWrite | MaskRead | ClampGates
