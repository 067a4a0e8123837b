"""Torch modules: explicit keyword arguments in, output and evidence out."""

from prismlm.layers.prototype_head import PrototypeHead
from prismlm.layers.prototype_mixer import MixerEvidence, PrototypeMixer

__all__ = ["MixerEvidence", "PrototypeHead", "PrototypeMixer"]
