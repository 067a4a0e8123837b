"""How much signal and noise heads keep in step, for a model's rotations and for others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError, check_finite, check_whole
from prismlm.ops.signal_noise_attention import SCALINGS, Scaling, group_frequencies
from prismlm.probes.heads.states import AttentionStates
from prismlm.probes.results import Row, Table

RATIOS = {
    "π": math.pi,
    "3": 3.0,
    "22/7": 22 / 7,
    "golden": (1 + math.sqrt(5)) / 2,
    "2": 2.0,
    "1": 1.0,
}
TERMS = ("signal_noise", "signal_signal", "noise_noise")
ORDER = 22
"""With which 22/7, the source's neighbour of π, is found to resonate."""
EXACT = 1e-12
"""|n ω_S − m ω_N| / (n ω_S) at and below which both are one frequency, rounded in float64."""


def cross_terms(states: Sequence[AttentionStates], *, length: int, order: int = ORDER) -> Table:
    """Return the cross terms of a model's own rotations, then of each ratio and scaling.

    E[C_u C_v] is measured on the model as it is; only the position term, a mean over ``length``
    positions, changes with the ratio. What a model trained with that ratio would do is another
    matter. Source: Prism, Eq. 9 to 12 and the conjecture of §2.3.

    Returns:
        A row for each ``ratio``: ``own``, of the model's frequencies, or one of :data:`RATIOS`; its
        ``value`` ρ; and what it scales, the base of the rotations or their angle. Cross terms K of
        Eq. 10 are means over all pairs of heads, a head with itself included: K_SN
        ``signal_noise``, K_SS ``signal_signal`` and K_NN ``noise_noise``; ``normalised`` is
        K_SN / √(K_SS K_NN), a cosine: 1 where both groups do the same. They are there for each of
        the ``layers``, as means over these, and by ``position``, with E[C_u C_v] = 1.
        ``denominator`` is that of :func:`denominator`, and ``later_denominator`` without each
        group's first pair, which scaling of the base leaves alike; None for heads of one pair. The
        fact ``least_in_step`` names the ratios and scalings of the least ``normalised``, all that
        tie to four decimals.
    """
    contents, own = _contents(states), own_cross_terms(states, length=length)
    attention = states[0].attention
    size, base = attention.head_size, attention.rotation[0]
    rotations: list[tuple[str, float, Scaling]] = [
        (own["ratio"], own["value"], own["scaling"]),
        *((name, ratio, scaling) for scaling in SCALINGS for name, ratio in RATIOS.items()),
    ]
    rows: list[Row] = []
    for name, ratio, scaling in rotations:
        row = own
        if rows:
            frequencies = group_frequencies(size, base, ratio, scaling)
            row = {"ratio": name, "value": ratio, "scaling": scaling}
            row |= _terms(contents, *frequencies, length)
        # Of the settings alone: float32 would round exact resonances away.
        exact = group_frequencies(size, base, ratio, scaling, dtype=torch.float64)
        row["denominator"] = denominator(*exact, order)
        signal, noise = (group[1:] for group in exact)
        row["later_denominator"] = denominator(signal, noise, order) if len(signal) else None
        rows.append(row)
    columns = {"ratio": "", "scaling": "", "signal_noise": ".3g", "signal_signal": ".3g",
               "noise_noise": ".3g", "normalised": ".4f", "position.normalised": ".4f",
               "denominator": ".2g", "later_denominator": ".2g"}  # fmt: skip
    least = min(round(row["normalised"], 4) for row in rows[1:])
    in_step = [
        f"{row['ratio']} of the {row['scaling']}"
        for row in rows[1:]
        if round(row["normalised"], 4) == least
    ]
    facts = {"length": length, "order": order, "least_in_step": in_step}
    title = "Cross terms of signal and noise heads, means over layers"
    return Table(title, columns, tuple(rows), facts)


def own_cross_terms(states: Sequence[AttentionStates], *, length: int) -> Row:
    """Return the cross terms of the model's own rotations alone, as :func:`cross_terms`."""
    contents = _contents(states)
    attention = states[0].attention
    _, ratio, scaling = attention.rotation
    # Those that the model runs with.
    signal, noise = attention.signal_frequencies.cpu(), attention.noise_frequencies.cpu()
    row: Row = {"ratio": "own", "value": ratio, "scaling": scaling}
    return row | _terms(contents, signal, noise, length)


def _contents(states: Sequence[AttentionStates]) -> list[list[Tensor]]:
    """Return E[C_u C_v] of each layer and of each of :data:`TERMS`, means over pairs of heads."""
    if not states:
        raise InputError("no layers to take cross terms of: expected the states of at least one.")
    contents: list[list[Tensor]] = []
    for one in states:
        amplitudes = content_amplitudes(one.projections())
        check_finite(f"the projections of layer {one.layer}", amplitudes)
        pairs = _pairs(*amplitudes.chunk(2))
        contents.append([content_term(*pair).mean((0, 1)) for pair in pairs])
    return contents


def _terms(contents: list[list[Tensor]], signal: Tensor, noise: Tensor, length: int) -> Row:
    places = [position_term(*pair, length) for pair in _pairs(signal, noise)]

    def integrated(content: Sequence[Tensor]) -> Row:
        pairs = zip(TERMS, content, places, strict=True)
        terms = {name: float((c * place).sum()) for name, c, place in pairs}
        size = math.sqrt(terms["signal_signal"] * terms["noise_noise"])
        return terms | {"normalised": terms["signal_noise"] / size if size > 0 else math.nan}

    layers = [integrated(content) for content in contents]
    means = {name: statistics.fmean(one[name] for one in layers) for name in layers[0]}
    return means | {"layers": layers, "position": integrated([torch.ones_like(places[0])] * 3)}


def _pairs(signal: Tensor, noise: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the groups that each of :data:`TERMS` is of."""
    return (signal, noise), (signal, signal), (noise, noise)


def position_term(
    first: Float[Tensor, " m"], second: Float[Tensor, " n"], length: int
) -> Float[Tensor, "m n"]:
    """Return E_τ[cos ω_u τ cos ω_v τ] over τ = 0 … T − 1; float64.

        ½ [ c(ω_u + ω_v) + c(ω_u − ω_v) ],   c(ω) = 1/T Σ_τ cos ωτ

    c has a closed form, sin(Tω/2) cos((T−1)ω/2) / (T sin(ω/2)), and is 1 at multiples of 2π.

    Source: Prism, Eq. 10 and 11, with the brackets that Eq. 11 needs.
    """
    check_whole("the number of positions of a mean", length, 1)

    def mean_cosine(omega: Tensor) -> Tensor:
        half = omega / 2
        sine = half.sin()
        # Near a multiple of 2π the quotient is 0/0, and the mean 1 to second order.
        near = sine.abs() < 1e-9
        quotient = (length * half).sin() * ((length - 1) * half).cos()
        return torch.where(near, 1.0, quotient / (length * sine.masked_fill(near, 1)))

    u, v = first.double()[:, None], second.double()[None]
    return (mean_cosine(u + v) + mean_cosine(u - v)) / 2


def content_amplitudes(projections: Float[Tensor, "G N p"]) -> Float[Tensor, "G N half"]:
    """Return the length of each rotated pair of each head's u: what C_u is a product of.

    A score of positions i and j is Σ over pairs of |u_i| |u_j| cos(ω τ + φ).
    """
    first, second = projections.double().chunk(2, -1)
    return torch.hypot(first, second)


def content_term(
    first: Float[Tensor, "G N m"], second: Float[Tensor, "F N n"]
) -> Float[Tensor, "G F m n"]:
    """Return E[C_uj C_vl] of each pair of heads u, v and of their rotated pairs j, l.

    C_uj = |u_i|_j |u_i'|_j for two positions i and i' drawn independently, so that
    E[C_uj C_vl] = (E_i |u_i|_j |v_i|_l)²: the same two positions for both heads, whose amplitudes
    are ``first`` and ``second``. Source: Prism, Eq. 10.
    """
    return (torch.einsum("gnj,fnl->gfjl", first, second) / first.shape[1]).square()


def denominator(signal: Float[Tensor, " m"], noise: Float[Tensor, " n"], order: int) -> float:
    """Return the least |n ω_S − m ω_N| over n, m from 1 to ``order`` and all pairs.

    In radians a position. Exact resonances are 0 and not the rounding of float64, if the
    frequencies are float64. Source: Prism, §2.3.
    """
    check_whole("the order of denominators", order, 1)
    factors = torch.arange(1, order + 1, dtype=torch.float64)
    own = torch.outer(factors, signal.double()).flatten()[:, None]
    apart = (own - torch.outer(factors, noise.double()).flatten()).abs()
    return float(apart.masked_fill(apart <= EXACT * own.abs(), 0.0).min())
