"""The prefix mean in blocks of positions, as linear attention whose decay is taken out.

Let a_i be the product of a block's decays before position i, S_0 and M_0 the state at its start.
What position j writes has decayed by a_i / a_j when i reads, so that with w'_j = w_j / a_j

    M_i / a_i = M_0 + Σ_{j<i} w'_j,  q_i = r_i a_i / M_i,  out_i = q_i S_0 + Σ_{j<i} (q_i·w'_j) v_j

are products of matrices, with gradients by autograd. 1 / a_j is as large as 1e269 where channels
forget at once, which float64 holds over 32 positions; what has width D is in float32. States of all
blocks are one product with the decays between them, in segments that follow one another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from prismlm.ops import tiles
from prismlm.ops.compaction import Reach
from prismlm.ops.prototype_mixer.state import (
    EMPTY_BELOW,
    PrefixState,
    check_arguments,
    empty_state,
    working_dtype,
)

SEGMENT, SEGMENT_OF_CPU = 4096, 1024
"""Positions computed at once: the decays between blocks grow with the square of their number."""
LEAST_LOG = -20.0
"""The logarithm of the smallest decay: e^(20·31) is a number in float64."""
CUT = -1000.0
"""The logarithm of a decay of 0."""
TINY = 1e-37
"""Factors below it are 0: numbers that are not normal take a processor a hundred times as long."""


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
    (float64 for float64 input); ``out`` has the dtype of the values. Decays below 2e-9 act as 2e-9.

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
    w, r, v = (tensor.to(dtype) for tensor in (write, read, values))
    held = None if state is None else PrefixState(*(tensor.to(dtype) for tensor in state))
    with torch.autocast(device_type=values.device.type, enabled=False):
        log = decay.to(_blocks(values.device)[1]).log().clamp_min(LEAST_LOG)
        if mask is not None:
            # What padding holds may be anything, and 0 · NaN is no 0.
            w, r, v = (tensor.masked_fill(~mask[..., None], 0) for tensor in (w, r, v))
            log = log.expand(w.shape).masked_fill(~mask[..., None], 0)
        rows = _Rows(w, r, v, log, starts)
        if w.shape[1] == 1 and not torch.compiler.is_exporting():
            out, end = _step(rows, held, normalise, groups)
        else:
            out, end = _segments(rows, held, normalise, groups)
    return out.to(values.dtype), end


class _Rows(NamedTuple):
    """Gates, values, logarithms of decays, [R] or [B, T, R], and starts of T positions."""

    write: Tensor
    read: Tensor
    values: Tensor
    log: Tensor
    starts: Tensor | None

    def segments(self, size: int) -> list[_Rows]:
        """Return parts of ``size`` positions; the gradient of a slice would be of all of them."""
        if self.write.shape[1] <= size:
            return [self]
        write, read, values = (torch.split(x, size, 1) for x in self[:3])
        log, starts = [self.log] * len(write), [self.starts] * len(write)
        if self.log.ndim == 3:
            log = torch.split(self.log, size, 1)
        if self.starts is not None:
            starts = torch.split(self.starts, size, 1)
        return [_Rows(*part) for part in zip(write, read, values, log, starts, strict=True)]


def _blocks(device: torch.device) -> tuple[int, torch.dtype]:
    """Return the positions of a block, and the dtype that holds 1 / a in it."""
    # Apple's GPUs have no float64.
    return (4, torch.float32) if device.type == "mps" else (32, torch.float64)


def _step(
    rows: _Rows, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    """Read one position from the state and write it, by the recurrence."""
    (w, q, v, log, starts), shape = rows, rows.values.shape
    sums, mass = empty_state(w, v, groups) if state is None else state
    if starts is not None:
        sums, mass = sums.masked_fill(starts[..., None], 0), mass.masked_fill(starts, 0)
    w, q, beta = w[:, 0], q[:, 0], (log[:, 0] if log.ndim == 3 else log).exp().to(w.dtype)
    if normalise:
        q = q / mass.masked_fill(mass < EMPTY_BELOW, torch.inf)
    parts = (len(w), groups, -1)
    by_group = sums.reshape(*parts, sums.shape[-1])
    out = (q.reshape(parts)[:, :, None] @ by_group).reshape(shape)
    given = v.reshape(parts)[:, :, None].expand_as(by_group).reshape(sums.shape)
    return out, PrefixState(beta[..., None] * (sums + w[..., None] * given), beta * (mass + w))


def _segments(
    rows: _Rows, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    """Chain segments through the state; an exported program, of any length, is one."""
    if torch.compiler.is_exporting():
        return _segment(rows, state, normalise, groups)
    outs: list[Tensor] = []
    size = SEGMENT_OF_CPU if tiles.in_cache(rows.write) else SEGMENT
    for part in rows.segments(size):
        out, state = _segment(part, state, normalise, groups)
        outs.append(out)
    assert state is not None
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1), state


def _segment(
    rows: _Rows, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    """Return the means of a segment and the state behind it, in n blocks of C positions."""
    length = rows.write.shape[1]
    dtype, (size, wide) = rows.write.dtype, _blocks(rows.write.device)
    # One more than needed where the length is a symbol, which decides nothing then.
    blocks = length // size + 2 if torch.compiler.is_exporting() else -(-length // size)
    write, read, values = (_split(x, blocks, size, groups) for x in rows[:3])
    since, until, whole = _log_decays(rows.log, length, blocks, size, groups)
    left, seen = _narrowed(until.exp(), dtype), None
    earlier = torch.ones(size, size, dtype=wide, device=write.device).tril(-1)
    if rows.starts is not None:
        reach = Reach.of(_split(rows.starts.long()[..., None], blocks, size, 1).squeeze(-1))
        earlier, seen, left = earlier * reach.same, reach.seen, left * reach.kept
        whole = whole.masked_fill(~reach.carried, CUT)
    keys = write * left
    at, end = _states(keys.mT @ values, keys.sum(-2), whole, state)

    decayed = since.exp()
    given, share = write / decayed, decayed
    if normalise:
        before = at.mass[..., None, :]
        mass = earlier @ given + (before if seen is None else before * seen)
        share = mass.masked_fill(mass * decayed < EMPTY_BELOW, torch.inf).reciprocal()
    scores = (((read * share) @ given.mT) * earlier).to(dtype)
    queries = read * _narrowed(share, dtype)
    queries = queries if seen is None else queries * seen
    out = (queries @ at.sums).flatten(0, 2)
    out = torch.baddbmm(out, scores.flatten(0, 2), values.flatten(0, 2)).view(values.shape)
    return _joined(out, length), end


def _split(x: Tensor, blocks: int, size: int, groups: int) -> Tensor:
    """Return [B, T, G·F] as [B, G, n, C, F], filled up with 0."""
    length = x.shape[1]
    if torch.compiler.is_exporting():
        # Indexed, as reshaping would depend on the length.
        first = torch.arange(blocks, device=x.device)[:, None] * size
        places = first + torch.arange(size, device=x.device)
        x = F.pad(x, (0, 0, 0, 1))[:, places.clamp_max(length)]
    else:
        x = F.pad(x, (0, 0, 0, blocks * size - length)) if blocks * size > length else x
        x = x.reshape(len(x), blocks, size, -1)
    parts = x.reshape(*x.shape[:3], groups, x.shape[3] // groups)
    return parts.permute(0, 3, 1, 2, 4).contiguous()


def _joined(x: Tensor, length: int) -> Tensor:
    """Return [B, G, n, C, F] as the [B, T, G·F] that it is of."""
    rows = x.permute(0, 2, 3, 1, 4)
    if torch.compiler.is_exporting():
        places = torch.arange(length, device=x.device)
        return rows[:, places // rows.shape[2], places % rows.shape[2]].flatten(2)
    return rows.reshape(len(x), -1, x.shape[1] * x.shape[4])[:, :length]


def _log_decays(
    log: Tensor, length: int, blocks: int, size: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithms of decays in blocks, where B and n are 1 if all are alike.

    From a block's start to each position and from there to its end, [B, G, n, C, R], and over each
    block, [B, G, n, R]. Padding is no step.
    """
    if log.ndim == 3:
        own = _split(log, blocks, size, groups)
        behind = own.cumsum(3)
        whole = behind[..., -1:, :]
        return behind - own, whole - behind + own, whole.squeeze(-2)
    own = log.view(1, groups, 1, 1, -1)
    since = own * torch.arange(size, device=log.device)[:, None]
    first = torch.arange(0, blocks * size, size, device=log.device)
    whole = own[..., 0, :] * (length - first).clamp_max(size)[:, None]
    return since, (whole[..., None, :] - since).clamp_max(0), whole


def _states(
    sums: Tensor, mass: Tensor, whole: Tensor, state: PrefixState | None
) -> tuple[PrefixState, PrefixState]:
    """Return the states at each block's start and the one behind the last.

    Args:
        sums, mass: what each block writes, as of its end; [B, G, n, R, D / G] and [B, G, n, R].
        whole: the logarithm of the decay over each block, [B or 1, G, n, R].
        state: before the first block.
    """
    ends = F.pad(whole.cumsum(2), (0, 0, 1, 0)).mT
    place = torch.arange(ends.shape[-1], device=ends.device)
    between = ends[..., :, None] - ends[..., None, :]
    hops = _narrowed(between.masked_fill(place[:, None] < place, CUT).exp(), sums.dtype)
    sums = torch.einsum("bgrnm,bgmrd->bgnrd", hops[..., 1:], sums)
    mass = torch.einsum("bgrnm,bgmr->bgnr", hops[..., 1:], mass)
    if state is not None:
        parts, left = (len(sums), sums.shape[1], 1, sums.shape[3]), hops[..., 0].mT
        sums = sums + left[..., None] * state.sums.reshape(*parts, sums.shape[4])
        mass = mass + left * state.mass.reshape(parts)
    count = sums.shape[2] - 1
    sums_at, sums_end = torch.split(sums, [count, 1], 2)
    mass_at, mass_end = torch.split(mass, [count, 1], 2)
    # A copy: a state keeps nothing else alive.
    end = PrefixState(sums_end.flatten(1, 3).contiguous(), mass_end.flatten(1, 3).contiguous())
    return PrefixState(sums_at, mass_at), end


def _narrowed(factor: Tensor, dtype: torch.dtype) -> Tensor:
    return F.hardshrink(factor, TINY).to(dtype)
