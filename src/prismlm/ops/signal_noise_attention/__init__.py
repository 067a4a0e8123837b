"""Attention of tied heads in two groups, signal minus noise (Prism)."""

from prismlm.ops.signal_noise_attention.fused import attend
from prismlm.ops.signal_noise_attention.rotary import (
    SCALINGS,
    Scaling,
    frequencies,
    group_frequencies,
    rotate,
)
from prismlm.ops.signal_noise_attention.weights import attention_weights

__all__ = [
    "SCALINGS",
    "Scaling",
    "attend",
    "attention_weights",
    "frequencies",
    "group_frequencies",
    "rotate",
]
