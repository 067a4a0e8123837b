"""Signal/noise attention as its equation, one head and position at a time; for tests."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.ops.signal_noise_attention.fused import check_arguments
from prismlm.ops.signal_noise_attention.rotary import rotate


def attend(
    u_signal: Float[Tensor, "B H S p"],
    u_noise: Float[Tensor, "B H S p"],
    noise_weight: float | Tensor,
    *,
    signal_frequencies: Float[Tensor, " half"],
    noise_frequencies: Float[Tensor, " half"],
    positions: Int64[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B 1 T S"] | None = None,
    queries: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B G T p"]:
    """Return the heads; same contract as :func:`fused.attend`.

    S_h,i = Σ_j softmax_j(scale · R_i u_i · R_j u_j) u_j over j ≤ i;  −λ N_h,i likewise
    """
    rotations = (signal_frequencies, noise_frequencies)
    asked = check_arguments(u_signal, u_noise, noise_weight, rotations, positions, mask, queries)
    batch, heads, seen, size = u_signal.shape
    factor = size**-0.5 if scale is None else scale
    lam = torch.as_tensor(noise_weight, dtype=u_noise.dtype, device=u_noise.device)
    groups: list[Tensor] = []
    for u, own, weight in (
        (u_signal, signal_frequencies, torch.ones_like(lam)),
        (u_noise, noise_frequencies, lam.neg()),
    ):
        rows: list[Tensor] = []
        for b in range(batch):
            place = torch.arange(seen, device=u.device) if positions is None else positions[b]
            for h in range(heads):
                turned = rotate(u[b, h], place, own)
                out: list[Tensor] = []
                for i in range(seen - asked, seen):
                    sees = torch.arange(seen, device=u.device) <= i
                    if mask is not None:
                        sees = mask[b, 0, i - (seen - asked)]
                    scores = factor * (turned[sees] @ turned[i])
                    out.append(torch.mul(scores.softmax(0) @ u[b, h][sees], weight))
                rows.append(torch.stack(out))
        groups.append(torch.stack(rows).reshape(batch, heads, asked, size))
    return torch.cat(groups, 1)
