"""Attention with tied heads: the output of signal heads minus that of noise heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.layers.linear import weight_of
from prismlm.ops.signal_noise_attention import (
    Scaling,
    attend,
    attention_weights,
    group_frequencies,
)


class SignalNoiseOutput(NamedTuple):
    """η (S − λN), to be added to Z, and Z U of the new positions, signal heads first, to cache."""

    output: Float[Tensor, "B T d"]
    projections: Float[Tensor, "B G T p"]


class OutputLinear(nn.Linear):
    """A linear map added to the residual stream, initialised with smaller weights."""


class SignalNoiseAttention(nn.Module):
    """One step up the difference of the coding rates of a signal and a noise dictionary.

        Z ← Z + η Σ_h { Att(Z U_s,h) (Z U_s,h) U_s,hᵀ − λ Att(Z U_n,h) (Z U_n,h) U_n,hᵀ }
        η = 1/√(R·K),   K = d/p,   R·K = 2H heads, H of signal and H of noise

    Queries, keys and values of a head are one projection Z U_h, and the output matrix is its
    transpose: R·d² parameters, where a standard block has 4d². Queries and keys are rotated with
    base·ρ for signal heads and base/ρ for noise heads, ρ = π in the source. ``scaling="angle"``
    instead multiplies the angles by ρ and 1/ρ, as in the source's Fig. 1, which gives signal heads
    the higher frequencies.

    Source: Prism, Eq. 6, 7 and 12. The source scales scores by 1/√d; here it is 1/√p, as in
    standard attention, unless ``scale_by_width``.

    Args:
        width: d.
        head_size: p, even, a divisor of d.
        expansion: R; R·d/p heads, half of them signal heads.
        tied: whether the output matrix is Uᵀ instead of separate parameters.
        base: of the rotations, before ρ.
        ratio: ρ.
        scaling: whether ρ scales the base or the angles.
        scale_by_width: divide scores by √d.
    """

    frequencies: Tensor

    def __init__(
        self,
        width: int,
        head_size: int,
        expansion: int = 2,
        *,
        tied: bool = True,
        base: float = 10_000.0,
        ratio: float = math.pi,
        scaling: Scaling = "base",
        scale_by_width: bool = False,
    ) -> None:
        super().__init__()
        self.heads = signal_heads(width, head_size, expansion)
        self.head_size = head_size
        self.rotation: tuple[float, float, Scaling] = (base, ratio, scaling)
        self.scale = width**-0.5 if scale_by_width else head_size**-0.5
        self.step = (2 * self.heads) ** -0.5
        inner = 2 * self.heads * head_size
        self.projection = nn.Linear(width, inner, bias=False)
        self.output_projection = None if tied else OutputLinear(inner, width, bias=False)
        self.register_buffer("frequencies", self.initial_values()["frequencies"], persistent=False)

    def initial_values(self) -> dict[str, Tensor]:
        """Return ω of signal and noise heads, in radians per position; no file has them."""
        return {"frequencies": group_frequencies(self.head_size, *self.rotation)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SignalNoiseAttention:
        """Move or cast the layer, but keep frequencies at least float32.

        Rounding to bf16 changes them by up to 0.4 %, half a turn at the 800th radian.
        """
        before = self.frequencies
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        if self.frequencies.dtype.itemsize < before.dtype.itemsize:
            self.frequencies = before.to(self.frequencies.device)
        return self

    def forward(
        self,
        z: Float[Tensor, "B T d"],
        noise_weight: float | Float[Tensor, ""],
        *,
        past: Float[Tensor, "B G P p"] | None = None,
        positions: Int64[Tensor, "B S"] | None = None,
        mask: Bool[Tensor, "B 1 T S"] | None = None,
    ) -> SignalNoiseOutput:
        """Attend from T new positions to all S = P + T positions.

        Args:
            z: the normalised stream.
            noise_weight: λ.
            past: ``projections`` of all P earlier positions.
            positions: of all S; None for 0, 1, …
            mask: which position sees which; None for causal.
        """
        batch, length, _ = z.shape
        new = self.projection(z).view(batch, length, 2 * self.heads, self.head_size).transpose(1, 2)
        signal, noise, how = self._inputs(new, past, positions, mask)
        heads = attend(signal, noise, noise_weight, **how)
        merged = heads.transpose(1, 2).reshape(batch, length, -1)
        if self.output_projection is not None:
            return SignalNoiseOutput(self.step * self.output_projection(merged), new)
        return SignalNoiseOutput(self.step * F.linear(merged, weight_of(self.projection, z).T), new)

    def weights(
        self,
        projections: Float[Tensor, "B G T p"],
        past: Float[Tensor, "B G P p"] | None = None,
        positions: Int64[Tensor, "B S"] | None = None,
        mask: Bool[Tensor, "B 1 T S"] | None = None,
    ) -> Float[Tensor, "B G T S"]:
        """Return the weights of a pass before λ, from its output's ``projections``."""
        signal, noise, how = self._inputs(projections, past, positions, mask)
        return attention_weights(signal, noise, **how)

    def _inputs(
        self, new: Tensor, past: Tensor | None, positions: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return u of both groups at all positions, and the other arguments of attention."""
        projections = new if past is None else torch.cat([past, new], 2)
        how = {"frequencies": self.frequencies, "positions": positions, "mask": mask}
        how |= {"queries": new.shape[2], "scale": self.scale}
        return projections[:, : self.heads], projections[:, self.heads :], how

    def dictionary(self, z: Float[Tensor, "B T d"]) -> Float[Tensor, "G d p"]:
        """Return the effective U of each head, signal heads first; ``z`` is any input."""
        return weight_of(self.projection, z).view(2 * self.heads, self.head_size, -1).mT


def signal_heads(width: int, head_size: int, expansion: int) -> int:
    """Return H = R·d / 2p; raise InputError for sizes that do not divide, or odd numbers."""
    if width % head_size or head_size % 2:
        raise InputError(f"a head size of {head_size} is no even divisor of a width of {width}.")
    heads = expansion * width // head_size
    if heads % 2:
        raise InputError(
            f"R = {expansion} and width / head size = {width // head_size} make {heads} heads: "
            "expected an even number, half for signal and half for noise."
        )
    return heads // 2
