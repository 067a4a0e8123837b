"""Signal/noise attention as its equation, one head and position at a time; for tests."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.ops.signal_noise_attention.rotary import rotate


def attend(
    u_signal: Float[Tensor, "B H S p"],
    u_noise: Float[Tensor, "B H S p"],
    noise_weight: float | Tensor,
    *,
    frequencies: Float[Tensor, "2 half"],
    positions: Int64[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B 1 T S"] | None = None,
    queries: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B G T p"]:
    """Return the heads; same contract as :func:`fused.attend`.

    S_h,i = Σ_j softmax_j(scale · R_i u_i · R_j u_j) u_j over j ≤ i;  −λ N_h,i likewise
    """
    batch, heads, length, size = u_signal.shape
    queries = length if queries is None else queries
    factor = size**-0.5 if scale is None else scale
    lam = torch.as_tensor(noise_weight, dtype=u_noise.dtype, device=u_noise.device)
    if positions is None:
        positions = torch.arange(length, device=u_signal.device).expand(batch, length)
    signs = (1 + 0 * lam, -lam)
    rows: list[Tensor] = []
    for b in range(batch):
        for u, omega, sign in zip((u_signal, u_noise), frequencies, signs, strict=True):
            for h in range(heads):
                rotated = rotate(u[b, h], positions[b], omega)
                for i in range(length - queries, length):
                    visible = torch.arange(length, device=u.device) <= i
                    if mask is not None:
                        visible = mask[b, 0, i - (length - queries)]
                    scores = factor * (rotated[visible] @ rotated[i])
                    rows.append(sign * (scores.softmax(0) @ u[b, h][visible]))
    return torch.stack(rows).view(batch, 2 * heads, queries, size)
