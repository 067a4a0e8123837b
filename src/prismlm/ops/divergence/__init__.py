"""How far one prediction is from another."""

from prismlm.ops.divergence.tiled import divergence

__all__ = ["divergence"]
