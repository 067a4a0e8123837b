"""Attention with tied heads in two groups, signal minus noise (Prism)."""

from prismlm.ops.signal_noise_attention.fused import attend, attention_weights
from prismlm.ops.signal_noise_attention.rotary import (
    Scaling,
    frequencies,
    group_frequencies,
    rotate,
)

__all__ = ["Scaling", "attend", "attention_weights", "frequencies", "group_frequencies", "rotate"]
