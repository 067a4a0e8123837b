"""The prefix mean in tiles: matrix products within blocks of positions, states between blocks.

A tile is up to 1,024 positions of some rows, few enough that what is computed of it stays in the
processor's caches; tiles of a row follow one another through the state. A GPU has one tile.
Padding is a decay of 1; the start of a packed sequence is a decay of 0 of the position before it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prismlm.ops import tiles
from prismlm.ops.prototype_mixer.block_means import over_mass
from prismlm.ops.prototype_mixer.blocks import blockwise_mean
from prismlm.ops.prototype_mixer.exported import prefix_mean_at_once
from prismlm.ops.prototype_mixer.state import (
    PrefixState,
    check_arguments,
    empty_state,
    working_dtype,
)

TILE_LENGTH = 1024
TILE = 4096
"""Positions of a tile, over all its rows."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Write and read gates, values and decays."""


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
    """Read the discounted mean of what earlier positions wrote into each of R channels.

        S_ik = Σ_{j<i} β_k^(i−j) write_jk v_j,   M_ik = Σ_{j<i} β_k^(i−j) write_jk,
        out_i = Σ_k read_ik S_ik / M_ik

    Position i sees only j < i; the first position without a state gives 0. A channel whose mass
    M_ik is below 1e-30 reads as empty: it gives 0 and passes on no gradient. Calls chained through
    ``state`` give what one call gives, and one position takes O(R·D). Sums and mass are float32
    (float64 for float64 input); ``out`` has the dtype of the values.

    Source: ProtoT, Eq. 1 and 2.

    Args:
        write: how much each position writes into each channel, at least 0.
        read: how much each position reads from each channel.
        values: what is written.
        decay: β_k, strictly between 0 and 1; or β_jk, with β_jk ⋯ β_(i−1)k in place of β_k^(i−j):
            the decay of position j acts behind it, on what it writes too.
        state: what earlier positions have written, or None for nothing.
        mask: False marks padding, wherever it stands: it neither writes, nor reads (its output is
            0), nor counts as a step of decay.
        starts: True where a sequence starts that sees nothing of what is before it, the state
            included.
        normalise: False leaves out the division by M.
        groups: G, which divides R and D; each of G equal parts of the channels and the values is a
            prefix mean of its own.

    Returns:
        The outputs, and the state that the next position reads.

    Raises:
        InputError: shapes that do not fit, no position or channel, a decay outside of (0, 1).
    """
    check_arguments(write, read, values, decay, state, mask, starts, groups)
    dtype = working_dtype(write, read, values, decay)
    w, r, v, beta = (tensor.to(dtype) for tensor in (write, read, values, decay))
    held = None if state is None else PrefixState(*(tensor.to(dtype) for tensor in state))
    if mask is not None or starts is not None:
        (w, r, v, beta), held = _with_flags((w, r, v, beta), held, mask, starts)
    with torch.autocast(device_type=values.device.type, enabled=False):
        if torch.compiler.is_exporting():
            out, end = prefix_mean_at_once(w, r, v, beta, held, normalise, groups)
        else:
            compute = _step if w.shape[1] == 1 else _tiles
            out, end = compute((w, r, v, beta), held, normalise, groups)
    return out.to(values.dtype), end


def _with_flags(
    inputs: Inputs, state: PrefixState | None, mask: Tensor | None, starts: Tensor | None
) -> tuple[Inputs, PrefixState | None]:
    """Return inputs that leave padding out and cut off what is before a start, and the state."""
    w, r, v, beta = inputs
    beta = beta.expand(w.shape)
    if mask is not None:
        # What padding holds may be anything, and 0 · NaN is no 0.
        w, r, v = (tensor.masked_fill(~mask[..., None], 0) for tensor in (w, r, v))
        beta = beta.masked_fill(~mask[..., None], 1)
    if starts is not None:
        before = torch.cat([starts[:, 1:], torch.zeros_like(starts[:, :1])], 1)
        beta = beta.masked_fill(before[..., None], 0)
        fresh = starts[:, :1]
        if state is not None:
            sums, mass = state
            state = PrefixState(sums.masked_fill(fresh[..., None], 0), mass.masked_fill(fresh, 0))
    return (w, r, v, beta), state


def _step(
    inputs: Inputs, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    """Read one position from the state and write it, by the recurrence."""
    w, r, v, beta = inputs
    sums, mass = empty_state(w, v, groups) if state is None else state
    w, q, beta = w[:, 0], r[:, 0], beta[:, 0] if beta.ndim == 3 else beta
    if normalise:
        q = over_mass(q, mass)
    parts = (len(w), groups, -1)
    by_group = sums.reshape(*parts, sums.shape[-1])
    out = (q.reshape(*parts)[:, :, None] @ by_group).reshape(v.shape)
    given = v.reshape(*parts)[:, :, None].expand_as(by_group).reshape(sums.shape)
    after = PrefixState(beta[..., None] * (sums + w[..., None] * given), beta * (mass + w))
    return out, after


def _tiles(
    inputs: Inputs, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    w = inputs[0]
    rows = max(1, TILE // min(w.shape[1], TILE_LENGTH))
    # On a GPU, and in compiled code, which would be written out tile by tile, rows stay together.
    if not tiles.in_cache(w) or torch.compiler.is_compiling() or rows >= len(w):
        return _row_tiles(inputs, state, normalise, groups)
    parts = _split(inputs, rows, 0)
    states: list[PrefixState | None] = [None] * len(parts)
    if state is not None:
        pairs = zip(torch.split(state.sums, rows), torch.split(state.mass, rows), strict=True)
        states = [PrefixState(*pair) for pair in pairs]
    found = [_row_tiles(*own, normalise, groups) for own in zip(parts, states, strict=True)]
    sums, mass = (torch.cat([end[n] for _, end in found]) for n in range(2))
    return torch.cat([out for out, _ in found]), PrefixState(sums, mass)


def _row_tiles(
    inputs: Inputs, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    outs: list[Tensor] = []
    for part in _split(inputs, TILE_LENGTH, 1) if tiles.in_cache(inputs[0]) else [inputs]:
        out, state = blockwise_mean(*part, state, normalise, groups)
        outs.append(out)
    assert state is not None
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1), state


def _split(inputs: Inputs, size: int, dim: int) -> list[Inputs]:
    """Return parts of the inputs along rows or positions; channels' decays are in each."""
    w, r, v = (torch.split(tensor, size, dim) for tensor in inputs[:3])
    beta = inputs[3]
    betas = torch.split(beta, size, dim) if beta.ndim == 3 else [beta] * len(w)
    return list(zip(w, r, v, betas, strict=True))
