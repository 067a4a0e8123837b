"""The delta rule in chunks: matrix products, and one triangular system each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.ops.precision import working_dtype
from prismlm.ops.sequences import check_flags, reach

CHUNK = 64


def check_arguments(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rates: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
) -> None:
    """Raise InputError for shapes that do not fit together."""
    if keys.ndim != 4 or 0 in keys.shape:
        raise InputError(
            f"keys must be [B, T, H, K] with at least one of each; got {list(keys.shape)}."
        )
    batch, length, heads, width = keys.shape
    rows = (batch, length, heads)
    if queries.shape != keys.shape or values.ndim != 4 or values.shape[:3] != rows:
        raise InputError(
            f"keys are {list(keys.shape)}, queries {list(queries.shape)} and values "
            f"{list(values.shape)}: expected equal shapes, but for the last size of values."
        )
    if rates.shape != rows:
        raise InputError(f"rates are {list(rates.shape)}: expected {list(rows)}, beside keys.")
    held = (batch, heads, width, values.shape[3])
    if state is not None and state.shape != held:
        raise InputError(
            f"the state is {list(state.shape)} and the input needs {list(held)}: it comes from "
            "another batch or another layer."
        )
    check_flags(rows[:2], mask=mask, starts=starts)


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
    """Write each value over what its key held, and read.

        S_t = S_{t−1} + b_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ,   out_t = S_tᵀ q_t

    Within a chunk that starts from S_0, what position i writes is n_i with
    (I + A) n = b ⊙ (v − k S_0), A_ij = b_i k_i·k_j for j < i: a unit triangular system. Computed
    in float32 (float64 for float64 input); ``out`` has the dtype of the values.

    Source: DeltaNet (Yang et al., 2024), the baseline of ProtoT.

    Args:
        queries: q.
        keys: k, of norm 1 for the memory to stay bounded.
        values: v.
        rates: b, from 0 to 1.
        state: S after earlier positions, or None for 0.
        mask: False marks padding, which neither writes nor reads (its output is 0).
        starts: True where a sequence starts that sees nothing of what is before it, the state
            included.

    Raises:
        InputError: shapes that do not fit together.
    """
    check_arguments(queries, keys, values, rates, state, mask, starts)
    batch, length, heads, width = keys.shape
    dtype = working_dtype(queries, keys, values, rates)
    with torch.autocast(device_type=values.device.type, enabled=False):
        memory = keys.new_zeros(batch, heads, width, values.shape[3], dtype=dtype)
        if state is not None:
            memory = state.to(dtype)
        q, k, v, b = (t.to(dtype) for t in (queries, keys, values, rates[..., None]))
        if mask is not None:
            # What padding holds may be anything, and 0 · NaN is no 0.
            q, k, v, b = (t.masked_fill(~mask[..., None, None], 0) for t in (q, k, v, b))
        out: list[Tensor] = []
        # The gradient of a slice is as large as the whole; that of an unbound part is not.
        unbound = (x.unbind(2) for x in _solved(q, k, v, b, starts))
        for new, through, asked, read, keys, left in zip(*unbound, strict=True):
            new = new - through @ memory
            out.append(asked @ memory + read @ new)
            memory = left * memory + keys @ new
    joined = torch.stack(out, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return joined.to(values.dtype), memory


def _solved(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, starts: Tensor | None
) -> tuple[Tensor, ...]:
    """Return what each chunk writes and reads, but for what it begins with, [B, H, n, …] each."""
    # Chunks of one size, as many as CHUNK asks for: those of CHUNK could be half padding.
    size = math.ceil(q.shape[1] / math.ceil(q.shape[1] / CHUNK))
    q, k, v, b = (_in_chunks(t, size) for t in (q, k, v, b))
    overlap, reading, written = (b * k) @ k.mT, (q @ k.mT).tril(), b * k
    held = torch.ones_like(b[..., :1, :])
    if starts is not None:
        sees = reach(_in_chunks(starts.long()[..., None, None], size).squeeze(-1))
        overlap, reading = overlap * sees.same, reading * sees.same
        written = written * sees.seen
        q, k, held = q * sees.seen, k * sees.kept, held * sees.carried[..., None]
    solve = cast("Callable[..., Tensor]", torch.linalg.solve_triangular)  # pyright: ignore[reportUnknownMemberType]
    known = torch.cat([b * v, written], -1)
    solved = solve(overlap.tril(-1), known, upper=False, unitriangular=True)
    return *torch.split(solved, [v.shape[-1], k.shape[-1]], -1), q, reading, k.mT, held


def _in_chunks(tensor: Tensor, size: int) -> Tensor:
    """Return [B, H, n, size, …] for [B, T, H, …], filled up with zeros, which write nothing."""
    padded = F.pad(tensor.transpose(1, 2), (0, 0, 0, -tensor.shape[1] % size))
    return padded.reshape(*padded.shape[:2], -1, size, padded.shape[3])
