"""Torch modules: explicit keyword arguments in, output and evidence out."""

from prismlm.layers.mixer_gates import MixerEvidence
from prismlm.layers.prototype_head import HeadLosses, HeadOutput, PrototypeHead
from prismlm.layers.prototype_mixer import MixerOutput, MixerState, PrototypeMixer

__all__ = [
    "HeadLosses",
    "HeadOutput",
    "MixerEvidence",
    "MixerOutput",
    "MixerState",
    "PrototypeHead",
    "PrototypeMixer",
]
