"""The prefix mean in blocks of positions, as linear attention whose decay is taken out.

Let a_j be the product of a block's decays before position j, S_0 and M_0 the state at its start.
What position j writes has decayed by a_i / a_j when i reads, so that with w'_j = w_j / a_j

    M_i / a_i = M_0 + Σ_{j<i} w'_j,  q_i = r_i a_i / M_i,  out_i = q_i S_0 + Σ_{j<i} (q_i·w'_j) v_j

are products of matrices. 1 / a_j is as large as 1e279 where channels forget at once, which float64
holds over 32 positions; what has width D is in float32. States of all blocks are one product with
the decays between them. A block's queries are those of the positions behind its own: where β is
small the one before is all that a query reads, and what cancels then is all in float64.
The backward pass keeps the states, and computes all else again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable  # pyright: ignore[reportUnknownVariableType]
from torch.nn import functional as F

from prismlm.ops import tiles
from prismlm.ops.compaction import Reach
from prismlm.ops.precision import working_dtype
from prismlm.ops.prototype_mixer.state import (
    EMPTY_BELOW,
    PrefixState,
    check_arguments,
    empty_state,
)

SEGMENT, TILE = 4096, 2048
"""Positions of a row computed at once; where caches hold them, of all rows together."""
LEAST = 2e-9
"""The smallest decay: 2e-9^-32 is a number in float64."""
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
    M_ik is below 1e-30 reads as empty. Calls chained through ``state`` give what one call gives.
    Sums and mass are float32 (float64 for float64 input); ``out`` has the dtype of the values.
    Decays below 2e-9 act as 2e-9. Source: ProtoT, Eq. 1 and 2.

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

    Raises:
        InputError: shapes that do not fit, no position or channel, a decay outside of (0, 1).
    """
    check_arguments(write, read, values, decay, state, mask, starts, groups)
    dtype = working_dtype(write, read, values, decay)
    w, r, v, beta = (tensor.to(dtype) for tensor in (write, read, values, decay))
    given = _Rows(w, r, v, beta, starts).kept(mask)
    held = None if state is None else PrefixState(*(tensor.to(dtype) for tensor in state))
    one = write.shape[1] == 1 and not torch.compiler.is_exporting()
    with torch.autocast(device_type=values.device.type, enabled=False):
        out, end = (_step if one else _segments)(given, held, normalise, groups)
    return out.to(values.dtype), end


class _Rows(NamedTuple):
    """Gates, values, decays, of which B may be 1, and starts of T positions."""

    write: Tensor
    read: Tensor
    values: Tensor
    decay: Tensor
    starts: Tensor | None

    def kept(self, mask: Tensor | None) -> _Rows:
        """Return rows in which padding does nothing, nor a start reads, and no decay is too small.

        What padding holds may be anything, and 0 · NaN is no 0.
        """
        w, r, v, beta, starts = self
        beta = beta.clamp_min(LEAST)
        if mask is not None:
            w, r, v = (tensor.masked_fill(~mask[..., None], 0) for tensor in (w, r, v))
            beta = beta.expand(w.shape).masked_fill(~mask[..., None], 1)
        elif beta.ndim == 1:
            # Wide, as its gradient is one sum over all positions.
            beta = beta.to(_blocks(w.device)[1]).expand(1, w.shape[1], -1)
        if starts is not None:
            r = r.masked_fill(starts[..., None], 0)
        return _Rows(w, r, v, beta, starts)

    def segments(self) -> Iterator[_Rows]:
        """Yield parts of so many positions as are computed at once."""
        size = SEGMENT
        if tiles.in_cache(self.write):
            # Compiled code is written out part by part.
            compiling = torch.compiler.is_compiling()
            size = TILE if compiling else max(TILE // len(self.write) // 32, 1) * 32
        # Split, as the gradient of a slice would be of all of them.
        parts = [repeat(None) if x is None else torch.split(x, size, 1) for x in self]
        return (_Rows(*part) for part in zip(*parts, strict=False))


def _blocks(device: torch.device) -> tuple[int, torch.dtype]:
    """Return the positions of a block, and the dtype that holds 1 / a in it."""
    # Apple's GPUs have no float64.
    return (4, torch.float32) if device.type == "mps" else (32, torch.float64)


def _read(read: Tensor, state: PrefixState, normalise: bool, groups: int) -> Tensor:
    """Return the mean that one position reads, [B, 1, D]."""
    q, sums = read, state.sums
    if normalise:
        q = q / state.mass.masked_fill(state.mass < EMPTY_BELOW, torch.inf)
    q, sums = q.reshape(len(q), groups, 1, -1), sums.reshape(len(q), groups, -1, sums.shape[-1])
    return (q @ sums).reshape(len(q), 1, -1)


def _step(
    rows: _Rows, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    """Read one position from the state and write it, by the recurrence."""
    w, r, v, beta, starts = rows
    state = empty_state(w, v, groups) if state is None else state
    w, r, beta = w[:, 0], r[:, 0], beta[:, 0].to(w.dtype)
    out, (sums, mass) = _read(r, state, normalise, groups), state
    if starts is not None:
        sums, mass = sums.masked_fill(starts[..., None], 0), mass.masked_fill(starts, 0)
    given = v.reshape(len(v), groups, 1, -1).expand(-1, -1, w.shape[1] // groups, -1).flatten(1, 2)
    return out, PrefixState(beta[..., None] * (sums + w[..., None] * given), beta * (mass + w))


def _segments(
    rows: _Rows, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    """Chain segments through the state; an exported program, of any length, is one."""
    length = rows.values.shape[1]
    if state is None:
        outs = [torch.zeros_like(rows.values[:, :1])]
    else:
        outs = [_read(rows.read[:, 0], state, normalise, groups)]
    rows = rows._replace(read=F.pad(rows.read, (0, 0, -1, 1)))
    if torch.compiler.is_exporting():
        out, at = _means(rows, state, normalise, groups)
        return torch.cat([*outs, out], 1)[:, :length], _last(at)
    apply = cast(Any, _Segment.apply)  # pyright: ignore[reportUnknownMemberType]
    for part in rows.segments():
        out, *held = apply(*part, *(state or (None, None)), normalise, groups)
        state = PrefixState(*held)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 1)[:, :length], state


class _Blocks(NamedTuple):
    """What stays of what positions write, in n blocks of C; B and n are 1 where all are alike.

    Attributes:
        lost: 1 / a, [B, G, n, C, R], and ``behind``, a of the position behind.
        log: the logarithm of the decay over each block, [B, G, n, R].
        end: what is seen from behind the block of a block's decay, [B, G, n, 1 or C, R].
        earlier: 1 where a query sees a position of its block, [C, C] or [B, 1, n, C, C].
        seen: whether it sees what is before its block, [B, 1, n, C, 1], or None for always.
    """

    lost: Tensor
    behind: Tensor
    log: Tensor
    end: Tensor
    earlier: Tensor
    seen: Tensor | None

    @classmethod
    def of(cls, decay: Tensor, starts: Tensor | None, blocks: int, groups: int) -> _Blocks:
        """Return it of decays [B, T, R]."""
        size, dtype = _blocks(decay.device)
        wide = _split(decay.to(dtype), blocks, size, groups, fill=1.0)
        log = wide.log().cumsum(3)
        behind, log = log.exp(), log[..., -1, :]
        earlier, seen = torch.ones(size, size, dtype=dtype, device=decay.device).tril(), None
        end = behind[..., -1:, :]
        if starts is not None:
            reach = Reach.of(_split(starts.long()[..., None], blocks, size, 1).squeeze(-1))
            earlier, seen, end = earlier * reach.same, reach.seen, end * reach.kept
            log = log.masked_fill(~reach.carried, CUT)
        return cls(wide / behind, behind, log, end, earlier, seen)

    def seen_of(self, x: Tensor) -> Tensor:
        """Return ``x`` of each position, 0 where it does not see what is before its block."""
        return x if self.seen is None else x * self.seen

    def share(self, given: Tensor, before: Tensor, normalise: bool) -> Tensor:
        """Return a / M of each query."""
        if not normalise:
            return self.behind
        mass = self.earlier @ given + self.seen_of(before[..., None, :])
        return mass.masked_fill(mass * self.behind < EMPTY_BELOW, torch.inf).reciprocal()

    def hops(self, dtype: torch.dtype) -> Tensor:
        """Return the decays between blocks' starts, from m to n, [B, G, R, n + 1, n + 1]."""
        ends = F.pad(self.log.cumsum(2), (0, 0, 1, 0)).mT
        return _narrowed((ends[..., :, None] - ends[..., None, :]).exp().tril(), dtype)


def _means(
    rows: _Rows, state: PrefixState | None, normalise: bool, groups: int
) -> tuple[Tensor, PrefixState]:
    """Return what is read behind each position, and states at blocks' starts and behind all."""
    length, size = rows.write.shape[1], _blocks(rows.write.device)[0]
    # One more than needed where the length is a symbol, which decides nothing then.
    blocks = length // size + 2 if torch.compiler.is_exporting() else -(-length // size)
    write, read, values = (_split(x, blocks, size, groups) for x in rows[:3])
    local = _Blocks.of(rows.decay, rows.starts, blocks, groups)
    given, hops = write * local.lost, local.hops(values.dtype)
    keys = _narrowed(given * local.end, values.dtype)
    sums = torch.einsum("bgrnm,bgmrd->bgnrd", hops[..., 1:], keys.mT @ values)
    mass = torch.einsum("bgrnm,bgmr->bgnr", hops[..., 1:], keys.sum(-2))
    if state is not None:
        parts, left = (len(values), groups, 1, mass.shape[3]), hops[..., 0].mT
        sums = sums + left[..., None] * state.sums.reshape(*parts, sums.shape[4])
        mass = mass + left * state.mass.reshape(parts)
    query = read * local.share(given, mass[:, :, :-1], normalise)
    scores = ((query @ given.mT) * local.earlier).to(values.dtype)
    out = local.seen_of(_narrowed(query, values.dtype)) @ sums[:, :, :-1]
    out = torch.baddbmm(out.flatten(0, 2), scores.flatten(0, 2), values.flatten(0, 2))
    return _joined(out.view(values.shape), length), PrefixState(sums, mass)


class _Segment(torch.autograd.Function):
    """``apply(*rows, sums, mass, normalise, groups)``: :func:`_means`, with gradients by hand."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """Return out, and the sums and the mass behind the last position."""
        *rows, sums, mass, normalise, groups = given
        state = None if sums is None else PrefixState(sums, mass)
        out, at = _means(_Rows(*rows), state, normalise, groups)
        ctx.save_for_backward(*rows, *at)
        ctx.normalise, ctx.fresh = normalise, state is None
        return out, *_last(at)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of every tensor that went in."""
        *rows, sums, mass = ctx.saved_tensors
        g, at, after = grads[0], PrefixState(sums, mass), PrefixState(*grads[1:])
        found, state = _gradients(_Rows(*rows), at, g, after, ctx.normalise)
        return *found, None, *((None, None) if ctx.fresh else state), None, None


def _last(at: PrefixState) -> PrefixState:
    # Copies: a state keeps nothing else alive.
    return PrefixState(*(x[:, :, -1].flatten(1, 2).contiguous() for x in at))


def _gradients(
    rows: _Rows, at: PrefixState, g: Tensor, after: PrefixState, normalise: bool
) -> tuple[tuple[Tensor, ...], PrefixState]:
    """Return those of gates, values, decays and of the state before.

    Args:
        at: the state at blocks' starts and behind the last.
        g: the gradient of the means.
        after: that of the state behind.
    """
    (length, size), dtype = (g.shape[1], _blocks(g.device)[0]), g.dtype
    groups, blocks = at.mass.shape[1], at.mass.shape[2] - 1
    write, read, values, g = (_split(x, blocks, size, groups) for x in (*rows[:3], g))
    local = _Blocks.of(rows.decay, rows.starts, blocks, groups)
    sums, mass = (x[:, :, :-1] for x in at)
    given, hops = write * local.lost, local.hops(dtype)
    share = local.share(given, mass, normalise)
    query, keys = read * share, _narrowed(given * local.end, dtype)
    scores = ((query @ given.mT) * local.earlier).to(dtype).flatten(0, 2)

    pairs = (g @ values.mT) * local.earlier
    dquery = local.seen_of(g @ sums.mT) + pairs @ given
    dread, dgiven = dquery * share, pairs.mT @ query
    dsums, dmass = local.seen_of(_narrowed(query, dtype)).mT @ g, None
    if normalise:
        dtotal = -dread * query
        dgiven += local.earlier.mT @ dtotal
        dmass = local.seen_of(dtotal).sum(-2).to(dtype)
    last = after.mass.reshape(len(g), groups, 1, -1)
    dmass = torch.cat([torch.zeros_like(mass) if dmass is None else dmass, last], 2)
    dsums = torch.cat([dsums, after.sums.reshape(*last.shape, -1)], 2)
    dsums = torch.einsum("bgrnm,bgnrd->bgmrd", hops, dsums)
    dmass = torch.einsum("bgrnm,bgnr->bgmr", hops, dmass)
    state = PrefixState(dsums[:, :, 0].flatten(1, 2), dmass[:, :, 0].flatten(1, 2))
    dsums, dmass = dsums[:, :, 1:], dmass[:, :, 1:]

    dkeys = (values @ dsums.mT + dmass[..., None, :]) * local.end
    dgiven += dkeys
    dvalues = (keys @ dsums).flatten(0, 2)
    dvalues = torch.baddbmm(dvalues, scores.mT, g.flatten(0, 2)).view(values.shape)
    # What passes through a decay: of a state, and of what a position writes or reads behind it.
    through = ((sums * dsums).sum(-1) + mass * dmass) * hops.diagonal(-1, -2, -1).mT
    through = (through + (dkeys * given).sum(-2))[..., None, :]
    passing = dgiven * given
    later = passing if normalise else passing - dquery * query
    if len(rows.decay) == 1:
        through, passing, later = (x.sum(0, keepdim=True) for x in (through, passing, later))
    dlog = through + passing - later.flip(3).cumsum(3).flip(3)
    ddecay = (_joined(dlog, length) / rows.decay).to(rows.decay.dtype)
    gates = (_joined(x.to(dtype), length) for x in (dgiven * local.lost, dread))
    return (*gates, _joined(dvalues, length), ddecay), state


def _split(x: Tensor, blocks: int, size: int, groups: int, fill: float = 0.0) -> Tensor:
    """Return [B, T, G·F] as [B, G, n, C, F], filled up."""
    length = x.shape[1]
    if torch.compiler.is_exporting():
        # Indexed, as reshaping would depend on the length.
        first = torch.arange(blocks, device=x.device)[:, None] * size
        places = first + torch.arange(size, device=x.device)
        x = F.pad(x, (0, 0, 0, 1), value=fill)[:, places.clamp_max(length)]
    else:
        x = F.pad(x, (0, 0, 0, blocks * size - length), value=fill) if blocks * size > length else x
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


def _narrowed(factor: Tensor, dtype: torch.dtype) -> Tensor:
    return F.hardshrink(factor, TINY).to(dtype)
