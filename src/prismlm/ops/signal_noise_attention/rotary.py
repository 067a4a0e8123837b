"""Rotary positions with separate frequencies for signal and noise heads."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.ops.tensors import working_dtype

Scaling = Literal["base", "angle"]


def frequencies(size: int, base: float, angle: float = 1.0) -> Float[Tensor, " half"]:
    """Return ω_j = angle · base^(−2j/p) for j < p/2, in radians per position; float32."""
    pair = torch.arange(size // 2, dtype=torch.float64)
    return (angle * base ** (-2 * pair / size)).float()


def group_frequencies(
    size: int, base: float, ratio: float, scaling: Scaling = "base"
) -> Float[Tensor, "2 half"]:
    """Return ω of signal and noise heads, in radians per position, for a head size p and ratio ρ.

        scaling "base":   (base · ρ)^(−2j/p)    and (base / ρ)^(−2j/p)
        scaling "angle":  ρ · base^(−2j/p)      and 1/ρ · base^(−2j/p)

    Source: Prism, Eq. 12, with ρ = π; its Fig. 1 scales angles.
    """
    if scaling == "angle":
        return torch.stack([frequencies(size, base, angle) for angle in (ratio, 1 / ratio)])
    return torch.stack([frequencies(size, base * ratio), frequencies(size, base / ratio)])


def rotate(
    x: Float[Tensor, "*heads S p"],
    positions: Int64[Tensor, "*#heads S"],
    frequencies: Float[Tensor, "*#heads half"],
) -> Float[Tensor, "*heads S p"]:
    """Rotate pair j, dimensions j and j + p/2, of each vector by position · ω_j.

        (a, b) ← (a cos − b sin, b cos + a sin)

    Angles are float32 (float64 for float64 input). Frequencies [p/2] are common to all heads, or
    broadcast against the axes before S.
    """
    dtype = working_dtype(x)
    angles = positions[..., None].to(dtype) * frequencies[..., None, :].to(dtype)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
