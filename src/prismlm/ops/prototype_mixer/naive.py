"""The prefix mean straight from its double sum: for tests and for reading, not for speed."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prismlm.ops.precision import working_dtype
from prismlm.ops.prototype_mixer.state import (
    EMPTY_BELOW,
    PrefixState,
    check_arguments,
)


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

    with β_jk ⋯ β_(i−1)k in place of β_k^(i−j) where each position has decays of its own.
    """
    check_arguments(write, read, values, decay, state, mask, starts, groups)
    rows: list[Tensor] = []
    ends: list[PrefixState] = []
    for b in range(len(write)):
        own = None if state is None else PrefixState(state.sums[b], state.mass[b])
        kept, first = (None if f is None else f[b] for f in (mask, starts))
        beta = decay.expand(write.shape)[b]
        given = write[b], read[b], values[b], beta, own, kept, first
        row, end = _row(given, normalise, groups)
        rows.append(row)
        ends.append(end)
    sums, mass = torch.stack([end.sums for end in ends]), torch.stack([end.mass for end in ends])
    return torch.stack(rows), PrefixState(sums, mass)


def _row(
    given: tuple[Tensor, Tensor, Tensor, Tensor, PrefixState | None, Tensor | None, Tensor | None],
    normalise: bool,
    groups: int,
) -> tuple[Tensor, PrefixState]:
    write, read, values, decay, state, mask, starts = given
    dtype = working_dtype(write, read, values, decay)
    w, q, v, beta = (tensor.to(dtype) for tensor in (write, read, values, decay))
    length, channels = w.shape
    group_of = [k * groups // channels for k in range(channels)]
    slices = v.reshape(length, groups, -1)
    written = slices[:, group_of]  # [T, R, D / G]: what each channel would be given
    kept = [mask is None or bool(mask[i]) for i in range(length)]
    flags = [starts is not None and bool(starts[i]) for i in range(length)]
    sequence = [sum(flags[: i + 1]) for i in range(length)]

    def before(i: int) -> PrefixState:
        sums, mass = torch.zeros_like(written[0]), w.new_zeros(channels)
        current = sequence[min(i, length - 1)]
        left = torch.ones_like(mass)  # at position i, of what was there at j
        for j in reversed(range(i)):
            if kept[j]:
                left = left * beta[j]
            if kept[j] and sequence[j] == current:
                weight = left * w[j]
                sums = sums + weight[:, None] * written[j]
                mass = mass + weight
        if state is not None and current == 0:
            sums = sums + left[:, None] * state.sums.to(dtype)
            mass = mass + left * state.mass.to(dtype)
        return PrefixState(sums, mass)

    out: list[Tensor] = []
    for i in range(length):
        sums, mass = before(i)
        row = list(torch.zeros_like(slices[0]))
        for k, g in enumerate(group_of):
            if not kept[i]:
                continue
            if not normalise:
                row[g] = row[g] + q[i, k] * sums[k]
            elif mass[k] >= EMPTY_BELOW:
                row[g] = row[g] + q[i, k] * (sums[k] / mass[k])
        out.append(torch.cat(row))
    return torch.stack(out).to(values.dtype), before(length)
