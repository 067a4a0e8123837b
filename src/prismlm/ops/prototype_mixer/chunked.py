"""The prefix mean in chunks: matrix products between blocks of positions, a table within them.

A chunk of up to 256 positions is computed at once, in blocks of 16. Within a block the powers
β^(i−j) stand in a table [16, 16, R]. What came before a block reaches it through the block's
state: powers are counted from the block's first position on the reading side and up to it on the
writing side, so no factor exceeds 1, however fast a channel forgets. Chunks follow one another
through the state. Memory is about R·(16 + D/16) numbers a position, never R·D.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from prismlm.ops.compaction import Compaction
from prismlm.ops.prototype_mixer.state import (
    EMPTY_BELOW,
    PrefixState,
    check_arguments,
    empty_state,
    working_dtype,
)

BLOCK = 16
CHUNK = 256
RECOMPUTED_ABOVE = 1024
"""Rows longer than this keep only states for the backward pass, and compute chunks again."""


def prefix_mean(
    write: Float[Tensor, "B T R"],
    read: Float[Tensor, "B T R"],
    values: Float[Tensor, "B T D"],
    decay: Float[Tensor, " R"],
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

    A padded position, wherever it stands in its row, neither writes, nor reads (its output is 0),
    nor counts as a step of decay. Sequences packed into one row do not see each other. With G
    groups, channels and values are cut into G equal parts, and each part is a prefix mean of its
    own.

    Source: ProtoT, Eq. 1 and 2.

    Args:
        write: how much each position writes into each channel, at least 0.
        read: how much each position reads from each channel.
        values: what is written.
        decay: β_k, strictly between 0 and 1.
        state: what earlier positions have written, or None for nothing.
        mask: False marks padding.
        starts: True where a sequence starts that sees nothing of what is before it, the state
            included.
        normalise: False leaves out the division by M.
        groups: G, which divides R and D.

    Returns:
        The outputs, and the state that the next position reads.

    Raises:
        InputError: shapes that do not fit, no position or channel, a decay outside of (0, 1).
    """
    check_arguments(write, read, values, decay, state, mask, starts, groups)
    dtype = working_dtype(write, read, values, decay)
    w, r, v, beta = (tensor.to(dtype) for tensor in (write, read, values, decay))
    held = empty_state(w, v, groups) if state is None else state
    held = PrefixState(held.sums.to(dtype), held.mass.to(dtype))
    with torch.autocast(device_type=values.device.type, enabled=False):
        if groups == 1:
            out, end = _group(w, r, v, beta, held, mask, starts, normalise)
        else:
            out, end = _groups(w, r, v, beta, held, mask, starts, normalise, groups)
    return out.to(values.dtype), end


def _groups(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor,
    state: PrefixState,
    mask: Tensor | None,
    starts: Tensor | None,
    normalise: bool,
    groups: int,
) -> tuple[Tensor, PrefixState]:
    ws, rs, vs, betas = (tensor.chunk(groups, -1) for tensor in (w, r, v, beta))
    sums, masses = (tensor.chunk(groups, 1) for tensor in state)
    outs: list[Tensor] = []
    ends: list[PrefixState] = []
    for g in range(groups):
        own = PrefixState(sums[g], masses[g])
        out, end = _group(ws[g], rs[g], vs[g], betas[g], own, mask, starts, normalise)
        outs.append(out)
        ends.append(end)
    end = PrefixState(torch.cat([e.sums for e in ends], 1), torch.cat([e.mass for e in ends], 1))
    return torch.cat(outs, -1), end


def _group(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor,
    state: PrefixState,
    mask: Tensor | None,
    starts: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, PrefixState]:
    if w.shape[1] == 1:
        return _step(w[:, 0], r[:, 0], v[:, 0], beta, state, mask, starts, normalise)
    if mask is None:
        sequence = None if starts is None else starts.cumsum(1)
        return _chunks(w, r, v, beta, state, sequence, normalise)
    return _padded(w, r, v, beta, state, mask, starts, normalise)


def _step(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor,
    state: PrefixState,
    mask: Tensor | None,
    starts: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, PrefixState]:
    """Read one position from the state and write it, by the recurrence."""
    sums, mass = state
    if starts is not None:
        # A padded position starts nothing by itself, but a state behind its start is gone.
        sums, mass = sums.masked_fill(starts[..., None], 0), mass.masked_fill(starts, 0)
    q = _share(r, mass) if normalise else r
    out = q[:, None] @ sums
    after = PrefixState(
        beta[:, None] * (sums + w[..., None] * v[:, None]),
        beta * (mass + w),
    )
    if mask is not None:
        out = out.masked_fill(~mask[..., None], 0)
        after = PrefixState(
            torch.where(mask[..., None], after.sums, sums), torch.where(mask, after.mass, mass)
        )
    return out, after


def _padded(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor,
    state: PrefixState,
    mask: Tensor,
    starts: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, PrefixState]:
    """Run rows with their padding moved to the end, and take each row's state where it ends."""
    places = Compaction.of(mask)
    # What padding holds may be anything, and 0 · NaN is no 0.
    w, v = w.masked_fill(~mask[..., None], 0), v.masked_fill(~mask[..., None], 0)
    w, r, v = places.compact(w), places.compact(r), places.compact(v)
    sequence = None if starts is None else places.compact(starts.cumsum(1))
    out, _ = _chunks(w, r, v, beta, state, sequence, normalise)
    steps = places.lengths[:, None] - torch.arange(w.shape[1], device=w.device)
    keys = w * beta ** steps.clamp_min(0)[..., None]
    carried = beta ** places.lengths[:, None]
    if starts is not None and sequence is not None:
        last = starts.sum(1)
        keys = keys * (sequence == last[:, None])[..., None]
        carried = carried * (last == 0)[:, None]
    return places.restore(out), _carry(state, carried, keys, v)


def _chunks(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor,
    state: PrefixState,
    sequence: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, PrefixState]:
    length = w.shape[1]
    powers = _Powers.of(beta, min(length, CHUNK))
    recompute = torch.is_grad_enabled() and length > RECOMPUTED_ABOVE
    parts: list[Tensor] = []
    before = None if sequence is None else torch.zeros_like(sequence[:, 0])
    for first in range(0, length, CHUNK):
        piece = slice(first, first + CHUNK)
        own = None if sequence is None else sequence[:, piece]
        arguments = (w[:, piece], r[:, piece], v[:, piece], powers, state, own, before, normalise)
        if recompute:
            again = cast(
                Any,
                checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False),
            )
            out, state = again
        else:
            out, state = _chunk(*arguments)
        parts.append(out)
        before = None if own is None else own[:, -1]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1), state


class _Powers(NamedTuple):
    """Powers of β: β^n for n up to a chunk's length, and the tables made of them."""

    of_steps: Float[Tensor, "n R"]
    within_block: Float[Tensor, "i j R"]
    between_blocks: Float[Tensor, "n m R"]

    @classmethod
    def of(cls, beta: Tensor, length: int) -> _Powers:
        blocks = -(-length // BLOCK)
        of_steps = beta ** torch.arange(blocks * BLOCK + 1, device=beta.device)[:, None]
        return cls(
            of_steps,
            _table(of_steps, BLOCK, 1),
            _table(of_steps[::BLOCK], blocks, 0),
        )


def _table(powers: Tensor, size: int, least: int) -> Tensor:
    """Return β^(i−j−1+least) for i > j, and 0 elsewhere: [i, j, R]."""
    position = torch.arange(size, device=powers.device)
    steps = position[:, None] - position
    return powers[(steps - 1 + least).clamp_min(0)] * (steps > 0)[..., None]


def _chunk(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    powers: _Powers,
    state: PrefixState,
    sequence: Tensor | None,
    before: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, PrefixState]:
    """Compute up to 256 positions of every row.

    ``sequence`` numbers the sequences of a row, and ``before`` is the number of the sequence that
    the state belongs to; only positions with equal numbers see each other.
    """
    length = w.shape[1]
    blocks = -(-length // BLOCK)
    shape = (len(w), blocks, BLOCK)
    missing = (0, 0, 0, blocks * BLOCK - length)
    w_, r_, v_ = (F.pad(tensor, missing).reshape(*shape, -1) for tensor in (w, r, v))
    sees = None
    if sequence is not None and before is not None:
        padded = F.pad(sequence[..., None], missing, value=-1).reshape(shape)
        sees = _Sight.of(padded, before)
    since_start = powers.of_steps[:BLOCK]
    local = w_[:, :, None] * powers.within_block
    if sees is not None:
        local = local * sees.each_other[..., None]
        since_start = since_start * sees.before[..., None]
    at_start = _block_states(w_, v_, powers, state, sees)
    mass = local.sum(3) + since_start * at_start.mass[:, :, None]
    q = _share(r_, mass) if normalise else r_
    out = (local @ q[..., None]).squeeze(-1) @ v_ + (q * since_start) @ at_start.sums

    keys, carried = w * powers.of_steps[1 : length + 1].flip(0), powers.of_steps[length]
    if sequence is not None and before is not None:
        last = sequence[:, -1:]
        keys = keys * (sequence == last)[..., None]
        carried = carried * (before[:, None] == last)
    return out.flatten(1, 2)[:, :length], _carry(state, carried, keys, v)


class _Sight(NamedTuple):
    """Which positions of a chunk's blocks belong to one sequence.

    Attributes:
        each_other: position i sees position j of its block.
        before: it sees what was before its block.
        end: it is seen behind its block.
        blocks: what is seen behind block m reaches block n.
        state: the chunk's state reaches block n.
    """

    each_other: Bool[Tensor, "B n i j"]
    before: Bool[Tensor, "B n i"]
    end: Bool[Tensor, "B n i"]
    blocks: Bool[Tensor, "B n m"]
    state: Bool[Tensor, "B n"]

    @classmethod
    def of(cls, sequence: Tensor, before: Tensor) -> _Sight:
        ends = sequence[..., -1]
        previous = torch.cat([before[:, None], ends[:, :-1]], 1)
        return cls(
            sequence[..., None] == sequence[..., None, :],
            sequence == previous[..., None],
            sequence == ends[..., None],
            previous[..., None] == ends[:, None],
            previous == before[:, None],
        )


def _block_states(
    w: Tensor, v: Tensor, powers: _Powers, state: PrefixState, sees: _Sight | None
) -> PrefixState:
    """Return the state at the first position of each block: [B, n, R, D] and [B, n, R]."""
    blocks = w.shape[1]
    keys = w * powers.of_steps[1 : BLOCK + 1].flip(0)
    carried = powers.of_steps[: blocks * BLOCK : BLOCK].expand(len(w), -1, -1)
    between = powers.between_blocks[:blocks, :blocks].expand(len(w), -1, -1, -1)
    if sees is not None:
        keys = keys * sees.end[..., None]
        carried = carried * sees.state[..., None]
        between = between * sees.blocks[..., None]
    written = keys.transpose(2, 3) @ v
    sums = torch.einsum("bnmr,bmrd->bnrd", between, written)
    mass = torch.einsum("bnmr,bmr->bnr", between, keys.sum(2))
    return PrefixState(
        sums + carried[..., None] * state.sums[:, None], mass + carried * state.mass[:, None]
    )


def _carry(state: PrefixState, carried: Tensor, keys: Tensor, v: Tensor) -> PrefixState:
    return PrefixState(
        carried[..., None] * state.sums + keys.transpose(1, 2) @ v,
        carried * state.mass + keys.sum(1),
    )


class _Share(torch.autograd.Function):
    """read / mass, and 0 where there is no mass."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, mass: Tensor) -> Tensor:
        empty = mass < EMPTY_BELOW
        share = (read / mass.masked_fill(empty, 1)).masked_fill(empty, 0)
        ctx.save_for_backward(share, mass)
        return share

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        share, mass = ctx.saved_tensors
        (gradient,) = grad_outputs
        empty = mass < EMPTY_BELOW
        mass = mass.masked_fill(empty, 1)
        # In this order: read / mass² exceeds float32 where the product with the gradient does not.
        return (gradient / mass).masked_fill(empty, 0), -(gradient * share) / mass


def _share(read: Tensor, mass: Tensor) -> Tensor:
    return cast(Tensor, _Share.apply(read, mass))  # pyright: ignore[reportUnknownMemberType]
