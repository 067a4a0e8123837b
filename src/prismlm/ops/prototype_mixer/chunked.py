"""The prefix mean in blocks of positions, as linear attention with the decay factored out.

Let a_j be the product of a block's decays before position j, and S_0 the state at its start. When
position i reads, what j wrote has decayed by a_i / a_j, so that with w'_j = w_j / a_j

    M_i / a_i = M_0 + Σ_{j<i} w'_j,  q_i = r_i a_i / M_i,  out_i = q_i S_0 + Σ_{j<i} (q_i·w'_j) v_j

are matrix products. 1 / a_j reaches 1e279 for fast decays, within float64 for 32 positions; tensors
of width D are float32. The states of all blocks are one product with the decays between them.
Queries are shifted by one position, since with a small β a query reads only the position before.
The backward pass saves the states, and recomputes everything else.
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
from prismlm.ops.sequences import reach
from prismlm.ops.tensors import check_axes, working_dtype

# The mass below which a channel is empty, near float32's smallest numbers.
EMPTY_BELOW = 1e-30
# Positions per segment of a row; on a CPU, with its caches, of all rows together.
SEGMENT, TILE = 4096, 2048
MIN_DECAY = 2e-9  # 2e-9^-32 is finite in float64
LOG_ZERO = -1000.0  # the logarithm of a decay of 0
TINY = 1e-37  # smaller factors become 0: subnormal numbers are a hundred times slower


class PrefixState(NamedTuple):
    """The sums and mass that the next position i reads; float32 or float64.

    S_k = Σ_j β_k^(i−j) w_jk v_j and M_k = Σ_j β_k^(i−j) w_jk, v_j the D / G values of k's group.
    """

    sums: Float[Tensor, "B R width"]
    mass: Float[Tensor, "B R"]


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
    """Return the discounted mean of values that earlier positions wrote into each of R channels.

        S_ik = Σ_{j<i} β_k^(i−j) write_jk v_j,   M_ik = Σ_{j<i} β_k^(i−j) write_jk,
        out_i = Σ_k read_ik S_ik / M_ik

    Position i sees only j < i; without a state the first output is 0. A channel with a mass M_ik
    below 1e-30 is empty. Calls chained through ``state`` equal one call. Sums and mass are float32
    (float64 for float64 input); ``out`` has the dtype of the values. Decays are at least 2e-9.
    Source: ProtoT, Eq. 1 and 2.

    Args:
        write, read: the gates, at least 0: how much each position writes into and reads from each
            channel.
        values: v.
        decay: β_k, between 0 and 1, exclusive; or β_jk, with β_jk ⋯ β_(i−1)k instead of β_k^(i−j):
            the decay of position j acts after it, including on what it writes.
        state: of the previous call; None at the start.
        mask: False on padding, wherever it stands: it neither writes nor reads (its output is 0)
            nor decays.
        starts: True where a new sequence begins, which sees neither earlier positions nor state.
        normalise: whether to divide by M.
        groups: G; each of G equal parts of channels and values is a separate prefix mean.
    """
    _check(write, read, values, decay, state, mask, starts)
    dtype = working_dtype(write, read, values, decay)
    w, r, v, beta = (x.to(dtype) for x in (write, read, values, decay.clamp_min(MIN_DECAY)))
    if mask is not None:
        # Not multiplied by 0: padding may be NaN.
        w, r, v = (x.masked_fill(~mask[..., None], 0) for x in (w, r, v))
        beta = beta.expand(w.shape).masked_fill(~mask[..., None], 1)
    elif beta.ndim == 1:
        beta = beta.to(_block(w)[1]).expand(1, w.shape[1], -1)  # float64: its gradient is one sum
    if starts is not None:
        r = r.masked_fill(starts[..., None], 0)
    parts = w.shape[0], groups, w.shape[2] // groups, -1
    initial = state and PrefixState(*(x.to(dtype).reshape(parts) for x in state))
    rows = _Rows(w, r, v, beta, starts, normalise, groups)
    with torch.autocast(device_type=values.device.type, enabled=False):
        if initial is None or w.shape[1] > 1:
            out, (sums, mass) = _segments(rows, initial)
        else:
            out, (sums, mass) = _step(rows, initial)
    # Copies: a view would keep larger tensors alive.
    sums, mass = sums.flatten(1, 2).contiguous(), mass.flatten(1).contiguous()
    return out.to(values.dtype), PrefixState(sums, mass)


def _check(
    write: Tensor,
    read: Tensor,
    values: Tensor,
    decay: Tensor,
    state: PrefixState | None,
    mask: Tensor | None,
    starts: Tensor | None,
) -> None:
    sums, mass = state or (None, None)
    check_axes(
        write=("B T R", write),
        read=("B T R", read),
        values=("B T D", values),
        decay=("R" if decay.ndim == 1 else "B T R", decay),
        sums=("B R width", sums),
        mass=("B R", mass),
        mask=("B T", mask),
        starts=("B T", starts),
    )


class _Rows(NamedTuple):
    """The inputs, with padding zeroed; decays may have B = 1, and states are [B, G, R, D or 1]."""

    write: Tensor
    read: Tensor
    values: Tensor
    decay: Tensor
    starts: Tensor | None
    normalise: bool
    groups: int


def _block(like: Tensor) -> tuple[int, torch.dtype]:
    """Return a block's length, and the dtype of 1 / a in it; Apple's GPUs lack float64."""
    return (4, torch.float32) if like.device.type == "mps" else (32, torch.float64)


def _first(rows: _Rows, state: PrefixState) -> Tensor:
    """Return the output of the first position, [B, 1, D]."""
    sums, mass = state
    q = rows.read[:, 0].reshape(mass.shape).mT
    if rows.normalise:
        q = q / mass.masked_fill(mass < EMPTY_BELOW, torch.inf).mT
    return (q @ sums).reshape(len(q), 1, -1)


def _step(rows: _Rows, state: PrefixState) -> tuple[Tensor, PrefixState]:
    """Process a single position by the recurrence."""
    out, (sums, mass) = _first(rows, state), state
    if rows.starts is not None:
        sums, mass = (x.masked_fill(rows.starts[..., None, None], 0) for x in state)
    write, beta = (x.to(mass.dtype).reshape(-1, *mass.shape[1:]) for x in (rows.write, rows.decay))
    written = write * rows.values.reshape(len(mass), rows.groups, 1, -1)
    return out, PrefixState(beta * (sums + written), beta * (mass + write))


def _segments(rows: _Rows, state: PrefixState | None) -> tuple[Tensor, PrefixState]:
    """Chain segments through the state."""
    length = rows.values.shape[1]
    outs = [torch.zeros_like(rows.values[:, :1]) if state is None else _first(rows, state)]
    rows = rows._replace(read=F.pad(rows.read, (0, 0, -1, 1)))
    size = SEGMENT
    if tiles.in_cache(rows.write):
        # Compiled code unrolls the segments: make them longer.
        batch = 1 if torch.compiler.is_compiling() else len(rows.write)
        size = max(TILE // batch // 32, 1) * 32
    apply = cast(Any, _Segment.apply)  # pyright: ignore[reportUnknownMemberType]
    # Split, since the gradient of a slice is as large as the whole tensor.
    parts = [repeat(None) if x is None else torch.split(x, size, 1) for x in rows[:5]]
    for part in zip(*parts, strict=False):
        out, *end = apply(*part, *rows[5:], *(state or (None, None)))
        state = PrefixState(*end)
        outs.append(out)
    return torch.cat(outs, 1)[:, :length], cast("PrefixState", state)


class _Blocks(NamedTuple):
    """Rows in n blocks of C, [B, G, n, C, F] each; decays may have B = 1.

    Attributes:
        read, values: of each position.
        inverse: 1 / a.
        after: a after the position.
        scaled: w'.
        keys: w' times the block's total decay ``end``.
        hops: decays from block start m to n, [B, G, R, n + 1, n + 1].
        visible: 1 where a query sees a position of its block, [C, C] or [B, 1, n, C, C].
        seen: whether a query sees the state at its block's start, [B, 1, n, C, 1]; None for always.
    """

    read: Tensor
    values: Tensor
    inverse: Tensor
    after: Tensor
    scaled: Tensor
    keys: Tensor
    end: Tensor
    hops: Tensor
    visible: Tensor
    seen: Tensor | None

    def if_seen(self, x: Tensor) -> Tensor:
        """Return ``x`` of each query, 0 where it does not see the state at its block's start."""
        return x if self.seen is None else x * self.seen

    def queries(self, start_mass: Tensor, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return a / M, q and q·w' of each query, from the mass at blocks' starts."""
        factor = self.after
        if normalise:
            mass = self.visible @ self.scaled + self.if_seen(start_mass.mT)
            factor = mass.masked_fill(mass * factor < EMPTY_BELOW, torch.inf).reciprocal()
        query = self.read * factor
        scores = ((query @ self.scaled.mT) * self.visible).to(start_mass.dtype)
        return factor, query, scores.flatten(0, 2)


def _blocks(rows: _Rows) -> _Blocks:
    (size, dtype), groups = _block(rows.write), rows.groups
    write, read, values = (_split(x, groups) for x in rows[:3])
    decay = _split(rows.decay.to(dtype), groups, fill=1.0)
    log = decay.log().cumsum(3)
    after, log = log.exp(), log[..., -1, :]
    visible, seen = torch.ones(size, size, dtype=dtype, device=decay.device).tril(), None
    end = after[..., -1:, :]
    if rows.starts is not None:
        sees = reach(_split(rows.starts.long()[..., None], 1).squeeze(-1))
        visible, seen, end = visible * sees.same, sees.seen, end * sees.kept
        log = log.masked_fill(~sees.carried, LOG_ZERO)
    starts = F.pad(log.cumsum(2), (0, 0, 1, 0)).mT
    hops = _narrowed((starts[..., :, None] - starts[..., None, :]).exp().tril(), values.dtype)
    inverse = decay / after
    scaled = write * inverse
    keys = _narrowed(scaled * end, values.dtype)
    return _Blocks(read, values, inverse, after, scaled, keys, end, hops, visible, seen)


def _means(rows: _Rows, state: PrefixState | None) -> tuple[Tensor, PrefixState]:
    """Return the outputs, and the states at blocks' starts and at the end."""
    blocks = _blocks(rows)
    written = blocks.keys.mT @ blocks.values, blocks.keys.sum(-2)[..., None]
    sums, mass = (torch.einsum("bgrnm,bgmrd->bgnrd", blocks.hops[..., 1:], x) for x in written)
    if state is not None:
        remaining = blocks.hops[..., 0].mT[..., None]
        sums = sums + remaining * state.sums[:, :, None]
        mass = mass + remaining * state.mass[:, :, None]
    _, query, scores = blocks.queries(mass[:, :, :-1], rows.normalise)
    out = blocks.if_seen(_narrowed(query, sums.dtype)) @ sums[:, :, :-1]
    out = torch.baddbmm(out.flatten(0, 2), scores, blocks.values.flatten(0, 2))
    return _joined(out.view(blocks.values.shape), rows.write.shape[1]), PrefixState(sums, mass)


class _Segment(torch.autograd.Function):
    """``apply(*rows, sums, mass)``: :func:`_means` with a hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Return out, and the state after the last position."""
        *rows, sums, mass = inputs
        state = None if sums is None else PrefixState(sums, mass)
        out, states = _means(_Rows(*rows), state)
        ctx.save_for_backward(*rows[:5], *states)
        ctx.settings, ctx.has_state = rows[5:], state is not None
        return out, *(x[:, :, -1] for x in states)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of every input tensor."""
        (*tensors, sums, mass), (g, *end_grads) = ctx.saved_tensors, grads
        rows, length, dtype = _Rows(*tensors, *ctx.settings), g.shape[1], g.dtype
        blocks, g = _blocks(rows), _split(g, rows.groups)
        sums, mass = sums[:, :, :-1], mass[:, :, :-1]
        factor, query, scores = blocks.queries(mass, rows.normalise)

        pairs = (g @ blocks.values.mT) * blocks.visible
        dquery = blocks.if_seen(g @ sums.mT) + pairs @ blocks.scaled
        dread, dscaled = dquery * factor, pairs.mT @ query
        dsums, dmass = blocks.if_seen(_narrowed(query, dtype)).mT @ g, torch.zeros_like(mass)
        if rows.normalise:
            dtotal = -dread * query
            dscaled += blocks.visible.mT @ dtotal
            dmass = blocks.if_seen(dtotal).sum(-2).to(dtype)[..., None]
        direct = zip((dsums, dmass), end_grads, strict=True)
        direct = (torch.cat([x, end[:, :, None]], 2) for x, end in direct)
        dstates = [torch.einsum("bgrnm,bgnrd->bgmrd", blocks.hops, x) for x in direct]
        dsums, dmass = (x[:, :, 1:] for x in dstates)

        dkeys = (blocks.values @ dsums.mT + dmass.mT) * blocks.end
        dscaled += dkeys
        dvalues = torch.baddbmm((blocks.keys @ dsums).flatten(0, 2), scores.mT, g.flatten(0, 2))
        # Gradients through a decay: of states, and of later writes and reads within the block.
        through = (sums * dsums).sum(-1) + (mass * dmass).squeeze(-1)
        through = through * blocks.hops.diagonal(-1, -2, -1).mT
        through = (through + (dkeys * blocks.scaled).sum(-2))[..., None, :]
        passing = dscaled * blocks.scaled
        later = passing if rows.normalise else passing - dquery * query
        if len(rows.decay) == 1:
            through, passing, later = (x.sum(0, keepdim=True) for x in (through, passing, later))
        dlog = through + passing - later.flip(3).cumsum(3).flip(3)
        ddecay = (_joined(dlog, length) / rows.decay).to(rows.decay.dtype)
        gates = (_joined(x.to(dtype), length) for x in (dscaled * blocks.inverse, dread))
        state = (x[:, :, 0] for x in dstates) if ctx.has_state else (None, None)
        return *gates, _joined(dvalues.view(g.shape), length), ddecay, None, None, None, *state


def _split(x: Tensor, groups: int, fill: float = 0.0) -> Tensor:
    """Return [B, T, G·F] as [B, G, n, C, F], padded with ``fill``."""
    length, size = x.shape[1], _block(x)[0]
    x = F.pad(x, (0, 0, 0, -length % size), value=fill) if length % size else x
    x = x.reshape(len(x), -1, size, x.shape[2])
    parts = x.reshape(*x.shape[:3], groups, x.shape[3] // groups)
    return parts.permute(0, 3, 1, 2, 4).contiguous()


def _joined(x: Tensor, length: int) -> Tensor:
    """Return [B, G, n, C, F] as [B, T, G·F]; the inverse of :func:`_split`."""
    return x.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)[:, :length]


def _narrowed(factor: Tensor, dtype: torch.dtype) -> Tensor:
    return F.hardshrink(factor, TINY).to(dtype)
