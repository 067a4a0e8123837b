"""Coding rates: nats that a cloud of points takes at a given distortion (Prism, Eq. 3 and 4)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError


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
    if not 0 < distortion < float("inf"):
        raise InputError(f"the distortion ε is {distortion}: expected a positive number.")
    z = points.double()
    if not bool(torch.isfinite(z).all()):
        raise InputError("a point is not finite: the model's weights hold NaN or infinity.")
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
