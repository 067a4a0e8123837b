"""The delta rule in chunks, within which a triangular system replaces the recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from prismlm.ops.sequences import reach
from prismlm.ops.tensors import check_axes, working_dtype

CHUNK = 64


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
    """Update the value stored under each key, and read; return outputs and the last state.

        S_t = S_{t−1} + b_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ,   out_t = S_tᵀ q_t

    In a chunk that starts from S_0, position i adds k_i n_iᵀ, where (I + A) n = b ⊙ (v − k S_0)
    and A_ij = b_i k_i·k_j for j < i, a unit triangular system. Its solution is n = u − w S_0.
    Computed in float32 (float64 for float64 input); ``out`` has the dtype of the values.

    Source: DeltaNet (Yang et al., 2024), the baseline of ProtoT.

    Args:
        queries: q.
        keys: k, of norm 1, which bounds the state.
        values: v.
        rates: b, from 0 to 1.
        state: S of earlier positions; None for 0.
        mask: False on padding, which is not written, and whose output is 0.
        starts: True where a new sequence begins, which sees neither earlier positions nor state.
    """
    check_axes(
        queries=("B T H K", queries),
        keys=("B T H K", keys),
        values=("B T H D", values),
        rates=("B T H", rates),
        state=("B H K D", state),
        mask=("B T", mask),
        starts=("B T", starts),
    )
    batch, length, heads, width = keys.shape
    dtype = working_dtype(queries, keys, values, rates)
    with torch.autocast(device_type=values.device.type, enabled=False):
        memory = keys.new_zeros(batch, heads, width, values.shape[3], dtype=dtype)
        if state is not None:
            memory = state.to(dtype)
        q, k, v, b = (t.to(dtype) for t in (queries, keys, values, rates[..., None]))
        if mask is not None:
            # Not multiplied by 0: padding may be NaN.
            q, k, v, b = (t.masked_fill(~mask[..., None, None], 0) for t in (q, k, v, b))
        out: list[Tensor] = []
        # unbind: the gradient of an index is as large as the whole tensor.
        chunks = zip(*(x.unbind(2) for x in _chunk_terms(q, k, v, b, starts)), strict=True)
        for u, w, chunk_q, scores, chunk_k, carry in chunks:
            n = u - w @ memory
            out.append(chunk_q @ memory + scores @ n)
            memory = carry * memory + chunk_k.mT @ n
    joined = torch.stack(out, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return joined.to(values.dtype), memory


def _chunk_terms(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, starts: Tensor | None
) -> tuple[Tensor, ...]:
    """Return u, w, q, scores of q and k, k, and the factor on S_0, [B, H, chunks, …] each.

    In packed rows q, w and the factor are 0 for positions that do not see S_0, and k is 0 for those
    that later chunks do not see.
    """
    # Chunks of equal size: with CHUNK positions each, the last could be mostly padding.
    size = math.ceil(q.shape[1] / math.ceil(q.shape[1] / CHUNK))
    q, k, v, b = (_in_chunks(t, size) for t in (q, k, v, b))
    scaled, scores, carry = b * k, (q @ k.mT).tril(), torch.ones_like(b[..., :1, :])
    overlap = scaled @ k.mT
    if starts is not None:
        sees = reach(_in_chunks(starts.long()[..., None, None], size).squeeze(-1))
        overlap, scores = overlap * sees.same, scores * sees.same
        scaled, q, k = scaled * sees.seen, q * sees.seen, k * sees.kept
        carry = carry * sees.carried[..., None]
    solve = cast("Callable[..., Tensor]", torch.linalg.solve_triangular)  # pyright: ignore[reportUnknownMemberType]
    right = torch.cat([b * v, scaled], -1)
    solved = solve(overlap.tril(-1), right, upper=False, unitriangular=True)
    u, w = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    return u, w, q, scores, k, carry


def _in_chunks(tensor: Tensor, size: int) -> Tensor:
    """Return [B, H, n, size, …] of [B, T, H, …], padded with zeros, which write nothing."""
    padded = F.pad(tensor.transpose(1, 2), (0, 0, 0, -tensor.shape[1] % size))
    return padded.reshape(*padded.shape[:2], -1, size, padded.shape[3])
