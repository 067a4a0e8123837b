"""The attention weights of signal and noise heads, which the fused form never holds."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.ops.signal_noise_attention.arguments import check_arguments
from prismlm.ops.signal_noise_attention.fused import values_and_keys


def attention_weights(
    u_signal: Float[Tensor, "B H S p"],
    u_noise: Float[Tensor, "B H S p"],
    *,
    signal_frequencies: Float[Tensor, " half"],
    noise_frequencies: Float[Tensor, " half"],
    positions: Int64[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B 1 T S"] | None = None,
    queries: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B G T S"]:
    """Return softmax_j(scale · (R_i u_i)·(R_j u_j)) over the positions j that i sees.

    What :func:`attend` weighs its values by, before λ: rows of a signal head and of a noise head
    sum to 1 alike. A position that sees nothing has a row of zeros.

    Held at once are the scores and the weights, twice what is returned, and the mask.

    Source: Prism, Eq. 6 and 7. Arguments as of :func:`attend`.

    Returns:
        Signal heads first, then noise heads: G = 2H.

    Raises:
        InputError: shapes that do not fit together.
    """
    rotations = (signal_frequencies, noise_frequencies)
    check_arguments(u_signal, u_noise, 0.0, rotations, positions, mask, queries)
    seen, size = u_signal.shape[2:]
    asked = seen if queries is None else queries
    device = u_signal.device
    place = torch.arange(seen, device=device)[None] if positions is None else positions
    if mask is None:
        ends = torch.arange(seen - asked, seen, device=device)
        mask = (torch.arange(seen, device=device) <= ends[:, None])[None, None]
    _, keys = values_and_keys(u_signal, u_noise, place, rotations)
    factor = size**-0.5 if scale is None else scale
    hidden = ~mask
    scores = (keys[:, :, seen - asked :] * factor) @ keys.mT
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    # For a position that sees nothing. The gradient of softmax needs what it returned.
    if weights.requires_grad:
        return weights.masked_fill(hidden, 0.0)
    return weights.masked_fill_(hidden, 0.0)
