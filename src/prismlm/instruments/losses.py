"""The loss of each token, from the logits of the prediction before it."""

from __future__ import annotations

from jaxtyping import Float, Float64, Int64
from torch import Tensor


def target_losses(
    logits: Float[Tensor, "*batch V"], targets: Int64[Tensor, "*batch"]
) -> Float64[Tensor, "*batch"]:
    """Return the cross-entropy of each target, nats; float64, on the CPU."""
    rows = logits.float()
    chosen = rows.gather(-1, targets.to(rows.device)[..., None])[..., 0]
    return (rows.logsumexp(-1) - chosen).double().cpu()
