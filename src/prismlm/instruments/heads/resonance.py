"""How much signal and noise heads keep in step, for a model's rotations and for others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from prismlm.errors import InputError, check_finite
from prismlm.instruments.heads.states import AttentionStates
from prismlm.ops.dictionaries import (
    content_amplitudes,
    content_term,
    position_term,
    smallest_denominator,
)
from prismlm.ops.signal_noise_attention import SCALINGS, Scaling, group_frequencies

RATIOS = {
    "π": math.pi,
    "3": 3.0,
    "22/7": 22 / 7,
    "golden": (1 + math.sqrt(5)) / 2,
    "2": 2.0,
    "1": 1.0,
}
ORDER = 22
"""With which 22/7, the source's neighbour of π, is found to resonate."""


@dataclass(frozen=True)
class CrossTerms:
    """K of Eq. 10, integrated over both groups: means over all pairs of heads.

    Attributes:
        signal_noise: K_SN.
        signal_signal: K_SS, a head with itself among the pairs, as in the integral over ρ_S twice.
        noise_noise: K_NN.
    """

    signal_noise: float
    signal_signal: float
    noise_noise: float

    @property
    def normalised(self) -> float:
        """K_SN / √(K_SS K_NN), a cosine: 1 where both groups do the same, 0 where apart."""
        size = math.sqrt(self.signal_signal * self.noise_noise)
        return self.signal_noise / size if size > 0 else math.nan

    def to_dict(self) -> dict[str, float]:
        """Return JSON values, the normalised term among them."""
        return {**asdict(self), "normalised": self.normalised}


@dataclass(frozen=True)
class Denominator:
    """The least |n ω_S − m ω_N| over all pairs of frequencies and n, m from 1 to an order.

    Attributes:
        value: in radians a position; 0 where frequencies resonate exactly.
        n: the multiple of ω_S.
        m: the multiple of ω_N.
    """

    value: float
    n: int
    m: int


@dataclass(frozen=True)
class RatioTerms:
    """The cross terms under one pair of rotations, with the content that the model has.

    Attributes:
        ratio: its name: "own" for the frequencies that the model has, else as :data:`RATIOS`.
        value: ρ.
        scaling: what ρ scales: the base of the rotations, or their angle.
        layers: the terms of each layer.
        position: the terms with all content alike, E[C_u C_v] = 1: of frequencies alone.
        denominator: over all rotated pairs.
        later_denominator: over all but each group's first pair, which scaling of the base leaves
            at 1 radian a position in both; None for heads of one pair.
    """

    ratio: str
    value: float
    scaling: Scaling
    layers: tuple[CrossTerms, ...]
    position: CrossTerms
    denominator: Denominator
    later_denominator: Denominator | None

    @property
    def normalised(self) -> float:
        """The mean over layers of K_SN / √(K_SS K_NN)."""
        return statistics.fmean(terms.normalised for terms in self.layers)

    def mean(self, term: str) -> float:
        """Return the mean over layers of one of K_SN, K_SS and K_NN, by its field's name."""
        return statistics.fmean(getattr(terms, term) for terms in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {
            "normalised": self.normalised,
            "position": self.position.to_dict(),
            "layers": [terms.to_dict() for terms in self.layers],
        }


def cross_terms(
    states: Sequence[AttentionStates], *, length: int, order: int = ORDER
) -> tuple[RatioTerms, ...]:
    """Return the cross terms of a model's own rotations, then of each ratio and scaling.

    E[C_u C_v] is measured on the model as it is; only the position term changes with the ratio.
    What a model trained with that ratio would do is another matter.

    Source: Prism, Eq. 9 to 12 and the conjecture of §2.3.

    Args:
        states: of :func:`read_states`; all layers have the same rotations.
        length: T; the position term is a mean over τ = 0 … T − 1.
        order: of the small denominators.

    Raises:
        InputError: no layer, T or the order below 1, or weights that are not finite.
    """
    return tuple(_each_ratio(states, length, order))


def denominators(
    size: int, base: float, ratio: float, scaling: Scaling, *, order: int = ORDER
) -> tuple[Denominator, Denominator | None]:
    """Return the least denominator of all pairs, and without each group's first pair.

    Of float64 frequencies, which settings alone give: float32 rounds exact resonances away.

    Args:
        size: p; with one pair alone there is no second figure.
        base, ratio, scaling: as of :func:`group_frequencies`.
        order: of n and m.

    Raises:
        InputError: as :func:`group_frequencies`, or an order below 1.
    """
    signal, noise = group_frequencies(size, base, ratio, scaling, dtype=torch.float64)
    least = Denominator(*smallest_denominator(signal, noise, order))
    if size == 2:
        return least, None
    return least, Denominator(*smallest_denominator(signal[1:], noise[1:], order))


def pair_ratios(size: int, base: float, ratio: float, scaling: Scaling) -> list[float]:
    """Return ω_S / ω_N of each pair: ρ^(−4j/p) with a scaled base, ρ² with scaled angles.

    Raises:
        InputError: as :func:`group_frequencies`.
    """
    signal, noise = group_frequencies(size, base, ratio, scaling, dtype=torch.float64)
    return (signal / noise).tolist()


def own_cross_terms(states: Sequence[AttentionStates], *, length: int) -> RatioTerms:
    """Return the first of :func:`cross_terms`: of the model's own rotations alone.

    Raises:
        InputError: as :func:`cross_terms`.
    """
    return next(_each_ratio(states, length, ORDER))


def _each_ratio(states: Sequence[AttentionStates], length: int, order: int) -> Iterator[RatioTerms]:
    if not states:
        raise InputError("no layers to take cross terms of: expected the states of at least one.")
    contents = [_content(one) for one in states]
    attention = states[0].attention
    size = attention.head_size
    base, own_ratio, own_scaling = attention.rotation
    rotations: list[tuple[str, float, Scaling]] = [
        ("own", own_ratio, own_scaling),
        *((name, ratio, scaling) for scaling in SCALINGS for name, ratio in RATIOS.items()),
    ]
    for name, ratio, scaling in rotations:
        signal, noise = group_frequencies(size, base, ratio, scaling)
        if name == "own":
            # Those that the model runs with.
            signal, noise = attention.signal_frequencies.cpu(), attention.noise_frequencies.cpu()
        places = [position_term(*pair, length) for pair in _pairs(signal, noise)]
        least, later = denominators(size, base, ratio, scaling, order=order)
        yield RatioTerms(
            ratio=name,
            value=ratio,
            scaling=scaling,
            layers=tuple(_integrated(content, places) for content in contents),
            position=_integrated([torch.ones_like(places[0])] * 3, places),
            denominator=least,
            later_denominator=later,
        )


def _pairs(signal: Tensor, noise: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return what SN, SS and NN are of."""
    return (signal, noise), (signal, signal), (noise, noise)


def _content(one: AttentionStates) -> list[Tensor]:
    """Return E[C_uj C_vl] of SN, SS and NN, [half, half]: means over pairs of heads."""
    amplitudes = content_amplitudes(one.projections())
    check_finite(f"the projections of layer {one.layer}", amplitudes)
    return [content_term(*pair).mean((0, 1)) for pair in _pairs(*amplitudes.chunk(2))]


def _integrated(content: Sequence[Tensor], places: Sequence[Tensor]) -> CrossTerms:
    return CrossTerms(*(float((c * place).sum()) for c, place in zip(content, places, strict=True)))
