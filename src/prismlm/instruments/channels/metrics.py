"""How concentrated activations are over P channels or heads: pure functions of one position each.

a are activations, of which the absolute value counts. Means over positions are the layer's figures.
Source: ProtoT, A.8, Eq. 3 to 5.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError, NotFiniteError


def sparsity_ratio(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return max_p |a_p| / mean_p |a_p|: 1 if all are equal, P if there is one alone; float64.

    The source calls its mean over positions the L1 sparsity ratio.

    Raises:
        InputError: activations that are not finite, or a position where all are zero.
    """
    a = _magnitudes(activations)
    return a.amax(-1) / a.mean(-1)


def gini(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return the Gini coefficient: 0 if all are equal, 1 − 1/P if there is one alone; float64.

        G = (P + 1 − 2 Σ_p (P + 1 − p) a↑_p / Σ_p a_p) / P,   a↑ ascending, p from 1

    Raises:
        InputError: as :func:`sparsity_ratio`.
    """
    a = _magnitudes(activations).sort(-1).values
    count = a.shape[-1]
    weights = torch.arange(count, 0, -1, dtype=a.dtype, device=a.device)
    return (count + 1 - 2 * (a * weights).sum(-1) / a.sum(-1)) / count


def entropy(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return −Σ_p q_p ln q_p with q = |a| / Σ |a|, in nats: ln P if all are equal; float64.

    Raises:
        InputError: as :func:`sparsity_ratio`.
    """
    a = _magnitudes(activations)
    shares = a / a.sum(-1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(-1)


def _magnitudes(activations: Tensor) -> Tensor:
    magnitudes = activations.detach().double().abs()
    if not bool(torch.isfinite(magnitudes).all()):
        raise NotFiniteError(
            "an activation is not finite: the model's weights hold NaN or infinity."
        )
    if magnitudes.shape[-1] == 0 or not bool((magnitudes.sum(-1) > 0).all()):
        raise InputError(
            "a position has no activation at all, so it has no distribution over channels: leave "
            "padding out, and do not mask every channel."
        )
    return magnitudes
