"""Dictionaries of heads: their coding rates, and how much their rotations keep in step (Prism)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError, check_finite, check_number, check_whole

EXACT = 1e-12
"""|n ω_S − m ω_N| / (n ω_S) at and below which both are one frequency, rounded in float64."""


def coding_rate(
    points: Float[Tensor, "*batch N d"], *, distortion: float = 0.5
) -> Float[Tensor, "*batch"]:
    """Return R(Z) = ½ log det(I + d / (N ε²) Z Zᵀ), in nats; float64.

    Z Zᵀ and Zᵀ Z have the same determinant here, so the smaller one is taken. With Z U_k of size
    [N, p] in place of Z this is the rate of one subspace, Eq. 4.

    Source: Prism, Eq. 3 and 4. The source leaves ε open; 0.5 is ours.

    Args:
        points: Z.
        distortion: ε.

    Raises:
        InputError: no point or no dimension, a distortion that is not positive, or points that are
            not finite.
    """
    count, width = points.shape[-2:] if points.ndim > 1 else (0, 0)
    if not count or not width:
        raise InputError(f"points are {list(points.shape)}: expected [..., N, d], none of them 0.")
    check_number("the distortion ε", distortion, "a positive number", lambda number: number > 0)
    z = points.double()
    check_finite("points", z)
    gram = z.mT @ z if width <= count else z @ z.mT
    scaled = gram * (width / (count * distortion**2))
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.slogdet(scaled + identity)[1] / 2


def subspace_rate(
    points: Float[Tensor, "N d"],
    dictionary: Float[Tensor, "H d p"],
    *,
    distortion: float = 0.5,
) -> Float[Tensor, ""]:
    """Return R(Z | U) = Σ_h R(Z U_h), in nats; float64.

    Source: Prism, §2.1.

    Raises:
        InputError: sizes that do not fit, or as :func:`coding_rate`.
    """
    if dictionary.ndim != 3 or points.ndim != 2 or dictionary.shape[1] != points.shape[1]:
        raise InputError(
            f"points are {list(points.shape)} and the dictionary {list(dictionary.shape)}: "
            "expected [N, d] and [H, d, p]."
        )
    projected = points.double() @ dictionary.double()
    return coding_rate(projected, distortion=distortion).sum()


def incoherence(signal: Float[Tensor, "d m"], noise: Float[Tensor, "d n"]) -> Float[Tensor, ""]:
    """Return ‖U_sᵀ U_n‖_F / (‖U_s‖_F ‖U_n‖_F): 0 for orthogonal dictionaries, at most 1; float64.

    Independent random directions give about 1/√d.

    Raises:
        InputError: other widths, or a dictionary of zeros.
    """
    if signal.ndim != 2 or noise.ndim != 2 or len(signal) != len(noise):
        raise InputError(
            f"dictionaries are {list(signal.shape)} and {list(noise.shape)}: expected [d, m] and "
            "[d, n]."
        )
    own, other = signal.double(), noise.double()
    size = _norm(own) * _norm(other)
    if not bool(size > 0):
        raise InputError("a dictionary is zero throughout: it has no direction.")
    return _norm(own.mT @ other) / size


def _norm(x: Tensor) -> Tensor:
    return x.square().sum().sqrt()


def position_term(
    first: Float[Tensor, " m"], second: Float[Tensor, " n"], length: int
) -> Float[Tensor, "m n"]:
    """Return E_τ[cos ω_u τ cos ω_v τ] over τ = 0 … T − 1; float64.

        ½ [ c(ω_u + ω_v) + c(ω_u − ω_v) ],   c(ω) = 1/T Σ_τ cos ωτ

    c has a closed form, sin(Tω/2) cos((T−1)ω/2) / (T sin(ω/2)), and is 1 at multiples of 2π.

    Source: Prism, Eq. 10 and 11, with the brackets that Eq. 11 needs.

    Raises:
        InputError: T below 1.
    """
    check_whole("the number of positions of a mean", length, 1)
    u, v = first.double()[:, None], second.double()[None]
    return (_mean_cosine(u + v, length) + _mean_cosine(u - v, length)) / 2


def _mean_cosine(omega: Tensor, length: int) -> Tensor:
    half = omega / 2
    sine = half.sin()
    # Near a multiple of 2π the quotient is 0/0, and the mean 1 to second order.
    near = sine.abs() < 1e-9
    quotient = (length * half).sin() * ((length - 1) * half).cos()
    return torch.where(near, 1.0, quotient / (length * sine.masked_fill(near, 1)))


def content_amplitudes(projections: Float[Tensor, "G N p"]) -> Float[Tensor, "G N half"]:
    """Return the length of each rotated pair of each head's u: what C_u is a product of.

    A score of positions i and j is Σ over pairs of |u_i| |u_j| cos(ω τ + φ), with the pair's
    lengths |u_i| and |u_j|.
    """
    first, second = projections.double().chunk(2, -1)
    return torch.hypot(first, second)


def content_term(
    first: Float[Tensor, "G N m"], second: Float[Tensor, "F N n"]
) -> Float[Tensor, "G F m n"]:
    """Return E[C_uj C_vl] of each pair of heads u, v and of their rotated pairs j, l.

    C_uj = |u_i|_j |u_i'|_j for two positions i and i' drawn independently, so that
    E[C_uj C_vl] = (E_i |u_i|_j |v_i|_l)²: the same two positions for both heads.

    Source: Prism, Eq. 10.

    Args:
        first, second: amplitudes of both groups' heads at the same N positions.

    Raises:
        InputError: other positions, or none.
    """
    if first.shape[1] != second.shape[1] or not first.shape[1]:
        raise InputError(
            f"amplitudes are {list(first.shape)} and {list(second.shape)}: expected both at the "
            "same positions, at least one."
        )
    return (torch.einsum("gnj,fnl->gfjl", first, second) / first.shape[1]).square()


def smallest_denominator(
    signal: Float[Tensor, " m"], noise: Float[Tensor, " n"], order: int
) -> tuple[float, int, int]:
    """Return the least |n ω_S − m ω_N| over n, m from 1 to ``order`` and all pairs, with n and m.

    Exact resonances are 0 and not the rounding of float64, if the frequencies are float64; of
    several the one with the least n is returned, then with the least m. Float32 frequencies
    resonate only where they are rounded alike.

    Source: Prism, §2.3.

    Raises:
        InputError: an order below 1.
    """
    check_whole("the order of denominators", order, 1)
    factor = torch.arange(1, order + 1, dtype=torch.float64)
    own = factor[:, None, None, None] * signal.double()[None, None, :, None]
    other = factor[None, :, None, None] * noise.double()[None, None, None]
    apart = (own - other).abs()
    least = apart.masked_fill(apart <= EXACT * own.abs(), 0.0).amin((2, 3))
    at = int(least.argmin())
    return float(least.flatten()[at]), at // order + 1, at % order + 1
