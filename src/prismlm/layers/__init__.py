"""Modules: explicit keyword arguments in, output and evidence out."""

from prismlm.layers.prototype_head import HeadLosses, HeadOutput, PrototypeHead

__all__ = ["HeadLosses", "HeadOutput", "PrototypeHead"]
