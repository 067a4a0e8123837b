"""Rotary positions with separate frequencies for signal and noise heads."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError

Scaling = Literal["base", "angle"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


def frequencies(
    size: int,
    base: float,
    *,
    angle: float = 1.0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " half"]:
    """Return ω_j = angle · base^(−2j/p) for j < p/2, in radians per position."""
    if size < 2 or size % 2:
        raise InputError(f"a head of size {size} has no pairs to rotate: expected an even size.")
    for name, value in (("base", base), ("angle", angle)):
        if not 0 < value < float("inf"):
            raise InputError(f"the {name} of rotary positions is {value}: expected above 0.")
    pair = torch.arange(size // 2, dtype=torch.float64, device=device)
    return (angle * base ** (-2 * pair / size)).to(dtype)


def group_frequencies(
    size: int,
    base: float,
    ratio: float,
    scaling: Scaling = "base",
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, " half"], Float[Tensor, " half"]]:
    """Return ω of signal and noise heads, in radians per position, for a head size p and ratio ρ.

        scaling "base":   (base · ρ)^(−2j/p)    and (base / ρ)^(−2j/p)
        scaling "angle":  ρ · base^(−2j/p)      and 1/ρ · base^(−2j/p)

    Source: Prism, Eq. 12, with ρ = π; its Fig. 1 scales angles.
    """
    if not 0 < ratio < float("inf"):
        raise InputError(f"the ratio of frequencies is {ratio}: expected above 0.")
    if scaling == "angle":
        signal = frequencies(size, base, angle=ratio, dtype=dtype)
        return signal, frequencies(size, base, angle=1 / ratio, dtype=dtype)
    signal = frequencies(size, base * ratio, dtype=dtype)
    return signal, frequencies(size, base / ratio, dtype=dtype)


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
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    angles = positions[..., None].to(dtype) * frequencies[..., None, :].to(dtype)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
