"""The divergence of two predictions straight from its equation: for tests and for reading."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def divergence(target: Float[Tensor, "N V"], logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """Return KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) per row, p and q the softmaxes of both."""
    p = target.softmax(-1).detach()
    return (p * (p.log() - logits.softmax(-1).log())).sum(-1)
