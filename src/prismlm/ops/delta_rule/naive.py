"""The delta rule as its recurrence; for tests."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def delta_rule(
    queries: Float[Tensor, "B T H K"],
    keys: Float[Tensor, "B T H K"],
    values: Float[Tensor, "B T H D"],
    rates: Float[Tensor, "B T H"],
    state: Float[Tensor, "B H K D"] | None = None,
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H D"], Float[Tensor, "B H K D"]]:
    """Return outputs and the last state; same contract as :func:`chunked.delta_rule`.

    S_t = S_{t−1} + b_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ,   out_t = S_tᵀ q_t
    """
    batch, length, heads, width = keys.shape
    memory = state if state is not None else keys.new_zeros(batch, heads, width, values.shape[3])
    out: list[Tensor] = []
    for t in range(length):
        if starts is not None:
            memory = torch.where(starts[:, t, None, None, None], 0, memory)
        k, v = keys[:, t], values[:, t]
        error = v - (memory * k[..., None]).sum(2)
        written = memory + rates[:, t, :, None, None] * k[..., None] * error[:, :, None]
        read = (written * queries[:, t, :, :, None]).sum(2)
        if mask is not None:
            written = torch.where(mask[:, t, None, None, None], written, memory)
            read = torch.where(mask[:, t, None, None], read, 0)
        memory = written
        out.append(read)
    return torch.stack(out, 1), memory
