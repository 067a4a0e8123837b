"""The prefix mean as its double sum; for tests."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prismlm.ops.prototype_mixer.chunked import EMPTY_BELOW, PrefixState
from prismlm.ops.tensors import working_dtype


def prefix_mean(
    write: Float[Tensor, "B T R"],
    read: Float[Tensor, "B T R"],
    values: Float[Tensor, "B T D"],
    decay: Float[Tensor, " R"] | Float[Tensor, "B T R"],
    state: PrefixState | None = None,
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
    normalise: bool = True,
    groups: int = 1,
) -> tuple[Float[Tensor, "B T D"], PrefixState]:
    """Return the prefix means; same contract as :func:`chunked.prefix_mean`.

    out_i = Σ_k read_ik (Σ_{j<i} β_k^(i−j) write_jk v_j) / (Σ_{j<i} β_k^(i−j) write_jk)

    with β_jk ⋯ β_(i−1)k instead of β_k^(i−j) if decays differ between positions.
    """
    dtype = working_dtype(write, read, values, decay)
    batch, length, channels = write.shape
    mask = torch.ones_like(write[..., 0], dtype=torch.bool) if mask is None else mask
    w, q, v = (x.to(dtype).masked_fill(~mask[..., None], 0) for x in (write, read, values))
    beta = decay.to(dtype).expand(write.shape).masked_fill(~mask[..., None], 1)
    sequence = torch.zeros_like(mask, dtype=torch.long) if starts is None else starts.cumsum(1)
    group_of = torch.arange(channels) * groups // channels
    written = v.view(batch, length, groups, -1)[:, :, group_of]  # [B, T, R, D / G]

    def before(i: int) -> PrefixState:
        current = sequence[:, min(i, length - 1), None]
        sums, mass = torch.zeros_like(written[:, 0]), torch.zeros_like(w[:, 0])
        decayed = torch.ones_like(mass)  # the product of decays from j to i
        for j in reversed(range(i)):
            decayed = decayed * beta[:, j]
            weight = decayed * w[:, j] * (sequence[:, j, None] == current)
            sums, mass = sums + weight[..., None] * written[:, j], mass + weight
        if state is not None:
            decayed = decayed * (current == 0)
            sums = sums + decayed[..., None] * state.sums.to(dtype)
            mass = mass + decayed * state.mass.to(dtype)
        return PrefixState(sums, mass)

    rows: list[Tensor] = []
    for i in range(length):
        sums, mass = before(i)
        share = q[:, i] / mass.masked_fill(mass < EMPTY_BELOW, torch.inf) if normalise else q[:, i]
        means = (share[..., None] * sums).view(batch, groups, channels // groups, -1)
        rows.append(means.sum(2).flatten(1))
    return torch.stack(rows, 1).to(values.dtype), before(length)
