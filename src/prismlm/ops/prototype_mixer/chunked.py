"""The prefix mean in blocks of positions, as linear attention whose decay is taken out.

Let a_j be the product of a block's decays before position j, and S_0 the state at its start. What
position j writes has decayed by a_i / a_j when i reads, so that with w'_j = w_j / a_j

    M_i / a_i = M_0 + Σ_{j<i} w'_j,  q_i = r_i a_i / M_i,  out_i = q_i S_0 + Σ_{j<i} (q_i·w'_j) v_j

are products of matrices. 1 / a_j reaches 1e279 where channels forget at once, which float64 holds
over 32 positions; what has width D is in float32. States of all blocks are one product with the
decays between them. A block's queries are those of the next positions: where β is small a query
reads only the one before. The backward pass keeps the states, and computes all else again.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable  # pyright: ignore[reportUnknownVariableType]
from torch.nn import functional as F

from prismlm.ops import tiles
from prismlm.ops.precision import working_dtype
from prismlm.ops.prototype_mixer.state import EMPTY_BELOW, PrefixState, check_arguments
from prismlm.ops.sequences import reach

# Positions of a row computed at once; where caches hold them, of all rows together.
SEGMENT, TILE = 4096, 2048
LEAST = 2e-9  # the smallest decay: 2e-9^-32 is a number in float64
CUT = -1000.0  # the logarithm of a decay of 0
TINY = 1e-37  # smaller factors are 0: subnormal numbers take a processor a hundred times as long


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
        write, read: how much each position writes into each channel, at least 0, and reads from it.
        values: what is written.
        decay: β_k, strictly between 0 and 1; or β_jk, with β_jk ⋯ β_(i−1)k in place of β_k^(i−j):
            the decay of position j acts behind it, on what it writes too.
        state: what earlier positions have written, or None for nothing.
        mask: False marks padding, wherever it stands: it neither writes, nor reads (its output is
            0), nor counts as a step of decay.
        starts: True where a sequence starts that sees nothing before it, the state included.
        normalise: False leaves out the division by M.
        groups: G; each of G equal parts of channels and values is a prefix mean of its own.

    Raises:
        InputError: shapes that do not fit, no position or channel, a decay outside of (0, 1).
    """
    check_arguments(write, read, values, decay, state, mask, starts, groups)
    dtype = working_dtype(write, read, values, decay)
    w, r, v, beta = (x.to(dtype) for x in (write, read, values, decay.clamp_min(LEAST)))
    if mask is not None:
        # What padding holds may be anything, and 0 · NaN is no 0.
        w, r, v = (x.masked_fill(~mask[..., None], 0) for x in (w, r, v))
        beta = beta.expand(w.shape).masked_fill(~mask[..., None], 1)
    elif beta.ndim == 1:
        beta = beta.to(_block(w)[1]).expand(1, w.shape[1], -1)  # wide: its gradient is one sum
    if starts is not None:
        r = r.masked_fill(starts[..., None], 0)
    parts = w.shape[0], groups, w.shape[2] // groups, -1
    held = state and PrefixState(*(x.to(dtype).reshape(parts) for x in state))
    rows = _Rows(w, r, v, beta, starts, normalise, groups)
    with torch.autocast(device_type=values.device.type, enabled=False):
        if held is None or w.shape[1] > 1 or torch.compiler.is_exporting():
            out, (sums, mass) = _segments(rows, held)
        else:
            out, (sums, mass) = _step(rows, held)
    # Copies: a state keeps nothing else alive.
    sums, mass = sums.flatten(1, 2).contiguous(), mass.flatten(1).contiguous()
    return out.to(values.dtype), PrefixState(sums, mass)


class _Rows(NamedTuple):
    """What is given, without padding; decays may have B = 1, and states are [B, G, R, D or 1]."""

    write: Tensor
    read: Tensor
    values: Tensor
    decay: Tensor
    starts: Tensor | None
    normalise: bool
    groups: int


def _block(like: Tensor) -> tuple[int, torch.dtype]:
    """Return a block's positions, and the dtype for 1 / a in it; Apple's GPUs have no float64."""
    return (4, torch.float32) if like.device.type == "mps" else (32, torch.float64)


def _first(rows: _Rows, held: PrefixState) -> Tensor:
    """Return the mean that the first position reads, [B, 1, D]."""
    sums, mass = held
    q = rows.read[:, 0].reshape(mass.shape).mT
    if rows.normalise:
        q = q / mass.masked_fill(mass < EMPTY_BELOW, torch.inf).mT
    return (q @ sums).reshape(len(q), 1, -1)


def _step(rows: _Rows, held: PrefixState) -> tuple[Tensor, PrefixState]:
    """Read one position from the state and write it, by the recurrence."""
    out, (sums, mass) = _first(rows, held), held
    if rows.starts is not None:
        sums, mass = (x.masked_fill(rows.starts[..., None, None], 0) for x in held)
    write, beta = (x.to(mass.dtype).reshape(-1, *mass.shape[1:]) for x in (rows.write, rows.decay))
    given = write * rows.values.reshape(len(mass), rows.groups, 1, -1)
    return out, PrefixState(beta * (sums + given), beta * (mass + write))


def _segments(rows: _Rows, held: PrefixState | None) -> tuple[Tensor, PrefixState]:
    """Chain segments through the state; an exported program, of any length, is one."""
    length = rows.values.shape[1]
    outs = [torch.zeros_like(rows.values[:, :1]) if held is None else _first(rows, held)]
    rows = rows._replace(read=F.pad(rows.read, (0, 0, -1, 1)))
    if torch.compiler.is_exporting():
        out, at = _means(rows, held)
        return torch.cat([*outs, out], 1)[:, :length], PrefixState(*(x[:, :, -1] for x in at))
    size = SEGMENT
    if tiles.in_cache(rows.write):
        # Compiled code is written out part by part.
        many = 1 if torch.compiler.is_compiling() else len(rows.write)
        size = max(TILE // many // 32, 1) * 32
    apply = cast(Any, _Segment.apply)  # pyright: ignore[reportUnknownMemberType]
    # Split, as the gradient of a slice would be of all of them.
    parts = [repeat(None) if x is None else torch.split(x, size, 1) for x in rows[:5]]
    for part in zip(*parts, strict=False):
        out, *end = apply(*part, *rows[5:], *(held or (None, None)))
        held = PrefixState(*end)
        outs.append(out)
    return torch.cat(outs, 1)[:, :length], cast("PrefixState", held)


class _Blocks(NamedTuple):
    """Rows in n blocks of C, [B, G, n, C, F] each; of decays B and n are 1 where all are alike.

    Attributes:
        read, values: of each position.
        lost: 1 / a, and ``behind``, a of the position behind.
        given: w'; ``keys`` are what is left of the gates behind the block, by its decay ``end``.
        hops: the decays between blocks' starts, from m to n, [B, G, R, n + 1, n + 1].
        earlier: 1 where a query sees a position of its block, [C, C] or [B, 1, n, C, C].
        seen: whether it sees what is before its block, [B, 1, n, C, 1], or None for always.
    """

    read: Tensor
    values: Tensor
    lost: Tensor
    behind: Tensor
    given: Tensor
    keys: Tensor
    end: Tensor
    hops: Tensor
    earlier: Tensor
    seen: Tensor | None

    def seen_of(self, x: Tensor) -> Tensor:
        """Return ``x`` of each position, 0 where it does not see what is before its block."""
        return x if self.seen is None else x * self.seen

    def queries(self, before: Tensor, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return a / M, q and q·w' of each query, from the mass at blocks' starts."""
        share = self.behind
        if normalise:
            mass = self.earlier @ self.given + self.seen_of(before.mT)
            share = mass.masked_fill(mass * share < EMPTY_BELOW, torch.inf).reciprocal()
        query = self.read * share
        scores = ((query @ self.given.mT) * self.earlier).to(before.dtype)
        return share, query, scores.flatten(0, 2)


def _blocks(rows: _Rows) -> _Blocks:
    (size, dtype), groups = _block(rows.write), rows.groups
    write, read, values = (_split(x, groups) for x in rows[:3])
    decay = _split(rows.decay.to(dtype), groups, fill=1.0)
    log = decay.log().cumsum(3)
    behind, log = log.exp(), log[..., -1, :]
    earlier, seen = torch.ones(size, size, dtype=dtype, device=decay.device).tril(), None
    end = behind[..., -1:, :]
    if rows.starts is not None:
        sees = reach(_split(rows.starts.long()[..., None], 1).squeeze(-1))
        earlier, seen, end = earlier * sees.same, sees.seen, end * sees.kept
        log = log.masked_fill(~sees.carried, CUT)
    ends = F.pad(log.cumsum(2), (0, 0, 1, 0)).mT
    hops = _narrowed((ends[..., :, None] - ends[..., None, :]).exp().tril(), values.dtype)
    lost = decay / behind
    given = write * lost
    keys = _narrowed(given * end, values.dtype)
    return _Blocks(read, values, lost, behind, given, keys, end, hops, earlier, seen)


def _means(rows: _Rows, held: PrefixState | None) -> tuple[Tensor, PrefixState]:
    """Return what is read behind each position, and states at blocks' starts and behind all."""
    own = _blocks(rows)
    written = own.keys.mT @ own.values, own.keys.sum(-2)[..., None]
    sums, mass = (torch.einsum("bgrnm,bgmrd->bgnrd", own.hops[..., 1:], x) for x in written)
    if held is not None:
        left = own.hops[..., 0].mT[..., None]
        sums, mass = sums + left * held[0][:, :, None], mass + left * held[1][:, :, None]
    _, query, scores = own.queries(mass[:, :, :-1], rows.normalise)
    out = own.seen_of(_narrowed(query, sums.dtype)) @ sums[:, :, :-1]
    out = torch.baddbmm(out.flatten(0, 2), scores, own.values.flatten(0, 2))
    return _joined(out.view(own.values.shape), rows.write.shape[1]), PrefixState(sums, mass)


class _Segment(torch.autograd.Function):
    """``apply(*rows, sums, mass)``: :func:`_means`, with gradients by hand."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """Return out, and the state behind the last position."""
        *rows, sums, mass = given
        held = None if sums is None else PrefixState(sums, mass)
        out, at = _means(_Rows(*rows), held)
        ctx.save_for_backward(*rows[:5], *at)
        ctx.how, ctx.fresh = rows[5:], held is None
        return out, *(x[:, :, -1] for x in at)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of every tensor that went in."""
        (*given, sums, mass), (g, *after) = ctx.saved_tensors, grads
        rows, length, dtype = _Rows(*given, *ctx.how), g.shape[1], g.dtype
        own, g = _blocks(rows), _split(g, rows.groups)
        sums, mass = sums[:, :, :-1], mass[:, :, :-1]
        share, query, scores = own.queries(mass, rows.normalise)

        pairs = (g @ own.values.mT) * own.earlier
        dquery = own.seen_of(g @ sums.mT) + pairs @ own.given
        dread, dgiven = dquery * share, pairs.mT @ query
        dsums, dmass = own.seen_of(_narrowed(query, dtype)).mT @ g, torch.zeros_like(mass)
        if rows.normalise:
            dtotal = -dread * query
            dgiven += own.earlier.mT @ dtotal
            dmass = own.seen_of(dtotal).sum(-2).to(dtype)[..., None]
        own_and_after = zip((dsums, dmass), after, strict=True)
        behind = (torch.cat([x, y[:, :, None]], 2) for x, y in own_and_after)
        dheld = [torch.einsum("bgrnm,bgnrd->bgmrd", own.hops, x) for x in behind]
        dsums, dmass = (x[:, :, 1:] for x in dheld)

        dkeys = (own.values @ dsums.mT + dmass.mT) * own.end
        dgiven += dkeys
        dvalues = torch.baddbmm((own.keys @ dsums).flatten(0, 2), scores.mT, g.flatten(0, 2))
        # What passes through a decay: of a state, and of what a position writes or reads behind it.
        through = (sums * dsums).sum(-1) + (mass * dmass).squeeze(-1)
        through = through * own.hops.diagonal(-1, -2, -1).mT
        through = (through + (dkeys * own.given).sum(-2))[..., None, :]
        passing = dgiven * own.given
        later = passing if rows.normalise else passing - dquery * query
        if len(rows.decay) == 1:
            through, passing, later = (x.sum(0, keepdim=True) for x in (through, passing, later))
        dlog = through + passing - later.flip(3).cumsum(3).flip(3)
        ddecay = (_joined(dlog, length) / rows.decay).to(rows.decay.dtype)
        gates = (_joined(x.to(dtype), length) for x in (dgiven * own.lost, dread))
        state = (None, None) if ctx.fresh else (x[:, :, 0] for x in dheld)
        return *gates, _joined(dvalues.view(g.shape), length), ddecay, None, None, None, *state


def _split(x: Tensor, groups: int, fill: float = 0.0) -> Tensor:
    """Return [B, T, G·F] as [B, G, n, C, F], filled up."""
    length, size = x.shape[1], _block(x)[0]
    if torch.compiler.is_exporting():
        # One block more than needed: reshaping would depend on the length, a symbol.
        places = torch.arange((length // size + 2) * size, device=x.device).view(-1, size)
        x = F.pad(x, (0, 0, 0, 1), value=fill)[:, places.clamp_max(length)]
    else:
        x = F.pad(x, (0, 0, 0, -length % size), value=fill) if length % size else x
        x = x.reshape(len(x), -1, size, x.shape[2])
    parts = x.reshape(*x.shape[:3], groups, x.shape[3] // groups)
    return parts.permute(0, 3, 1, 2, 4).contiguous()


def _joined(x: Tensor, length: int) -> Tensor:
    """Return [B, G, n, C, F] as the [B, T, G·F] that it is of."""
    rows = x.permute(0, 2, 3, 1, 4).flatten(3)
    if torch.compiler.is_exporting():
        places = torch.arange(length, device=x.device)
        return rows[:, places // x.shape[3], places % x.shape[3]]
    return rows.flatten(1, 2)[:, :length]


def _narrowed(factor: Tensor, dtype: torch.dtype) -> Tensor:
    return F.hardshrink(factor, TINY).to(dtype)
