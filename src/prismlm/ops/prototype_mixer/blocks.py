"""The prefix mean of some positions of some rows, in blocks, with gradients by hand.

The backward pass keeps masses and the blocks' states, and computes all else again: R + R·D/C
numbers a position beside the inputs. The adjoint state Λ_i = q_i g_iᵀ + β_i Λ_(i+1) is to it what
the state is to the forward pass. What passes between positions i and i + 1 is, with λ the adjoint
of the mass,

    u_(i+1) = S_(i+1)·Λ_(i+1) + M_(i+1) λ_(i+1),   dβ_i = u_(i+1) / β_i

Where all positions have one decay, each pair counts as often as there are decays between the two,
and is added up so, as differences of sums would lose digits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable  # pyright: ignore[reportUnknownVariableType]

from prismlm.ops import tiles
from prismlm.ops.prototype_mixer.block_means import (
    Factors,
    Kept,
    block_means,
    blocks_of,
    chained,
    channel_factors,
    halves,
    halves_written,
    joined,
    of_joined,
    over_mass,
    pair_scores,
    quadrants,
    rows_of,
    token_factors,
)
from prismlm.ops.prototype_mixer.state import EMPTY_BELOW, PrefixState

BLOCK = 32


class Distances(NamedTuple):
    """How many decays act, where all positions have the same.

    Attributes:
        since: from a block's start to each of its positions, [C, 1].
        until: from each position to its block's end, [n, C, 1].
        whole: over a block, [n, 1].
    """

    since: Tensor
    until: Tensor
    whole: Tensor

    @classmethod
    def of(cls, length: int, size: int, like: Tensor) -> Distances:
        """Return those of rows of ``length`` positions in blocks of ``size``."""
        place = torch.arange(size, device=like.device, dtype=like.dtype)[:, None]
        starts = torch.arange(0, length, size, device=like.device, dtype=like.dtype)[:, None]
        whole = (length - starts).clamp_max(size)
        return cls(place, (whole[:, None] - place).clamp_min(0), whole)


class Gradients(NamedTuple):
    """Gradients of a tile's inputs in blocks.

    Attributes:
        w, r, v, state: of these.
        passing: with decays by token u behind each position, [B, G, n, C, R]; else its sum over
            positions, [G, R].
    """

    w: Tensor
    r: Tensor
    v: Tensor
    state: PrefixState
    passing: Tensor


class _Flow(NamedTuple):
    """What reaches positions and what leaves them, before the other side's share.

    Attributes:
        q: the read gate over the mass.
        dmass: the gradient of the mass, or None without mass normalisation.
        parts: what first halves write, level by level.
        arrived: of what came from before the block, what a position's q is multiplied by.
        met: the same of the other half, level by level, as of the half's start.
        left: of what goes behind the block, what a position's w is multiplied by.
        returned: the same of the other half, level by level, as of the half's end.
        behind: the adjoint state behind each block.
    """

    q: Tensor
    dmass: Tensor | None
    parts: list[Tensor]
    arrived: Tensor
    met: list[Tensor]
    left: Tensor
    returned: list[Tensor]
    behind: PrefixState


def block_gradients(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    g: Tensor,
    factors: Factors,
    kept: Kept,
    after: PrefixState,
    distances: Distances | None,
    normalise: bool,
) -> Gradients:
    """Return the gradients of a tile's inputs from ``g``, that of the means, and ``after``."""
    q = over_mass(r, kept.mass) if normalise else r
    parts = halves_written(w, factors)
    pairs = g @ v.mT
    arrived = (g @ kept.sums_at.mT) * factors.since
    met, dq = _met(pairs, arrived, parts, factors)
    dr, dmass = dq, None
    if normalise:
        dmass = _mass_gradient(dq, q, kept.mass)
        dr = over_mass(dq, kept.mass)
    state, behind = _adjoints((q * factors.since).mT @ g, dmass, factors, after)
    left = (v @ behind.sums.mT + behind.mass[..., None, :]) * factors.until
    returned = _returned(pairs, q, dmass, factors)
    dw = left.clone()
    exact = returned
    if normalise:
        exact = _returned_exactly(pairs, g, v, q, arrived, parts, factors, kept)
    for level, own in zip(factors.levels, exact, strict=True):
        halves(dw, level.size)[0].addcmul_(own, level.until)
    dv = torch.baddbmm(
        ((w * factors.until) @ behind.sums).flatten(0, 2),
        pair_scores(q, parts, factors).flatten(0, 2).mT,
        g.flatten(0, 2),
    ).reshape(v.shape)
    if distances is None:
        passing = _passing_by_token(w, dw, q, dq, dmass, kept, behind)
    else:
        flow = _Flow(q, dmass, parts, arrived, met, left, returned, behind)
        passing = _passing_in_all(w, flow, factors, kept, distances)
        if normalise:
            passing += _between(kept.end_sums, kept.end_mass, after).sum(0)
            passing -= _between(kept.sums_at[:, :, 0], kept.mass_at[:, :, 0], state).sum(0)
    return Gradients(dw, dr, dv, state, passing)


def _met(
    pairs: Tensor, arrived: Tensor, parts: list[Tensor], factors: Factors
) -> tuple[list[Tensor], Tensor]:
    """Return what second halves' q are multiplied by, level by level, and the gradient of q."""
    met = [
        quadrants(pairs, level.size).flatten(2, 3) @ part
        for level, part in zip(factors.levels, parts, strict=True)
    ]
    dq = arrived.clone()
    for level, own in zip(factors.levels, met, strict=True):
        halves(dq, level.size)[1].addcmul_(own, level.since)
    return met, dq


def _mass_gradient(dq: Tensor, q: Tensor, mass: Tensor) -> Tensor:
    # In this order: q / M exceeds float32 where the product with the gradient does not.
    return -(dq * q) / mass.masked_fill(mass < EMPTY_BELOW, 1)


def _returned_exactly(
    pairs: Tensor,
    g: Tensor,
    v: Tensor,
    q: Tensor,
    arrived: Tensor,
    parts: list[Tensor],
    factors: Factors,
    kept: Kept,
) -> list[Tensor]:
    """Return :func:`_returned` with mass normalisation, to more digits where β is small.

    A query's weights add up to 1, so that the gradients are those of v_j − c for any c that all
    its channels have in common. With c the value before it, the pairs that weigh most where β is
    small are exactly 0, and what they would cancel keeps its digits. Decays near 1 lose by it,
    which shows in their sum over all positions and not in w's.
    """
    nearest = torch.zeros_like(pairs[..., 0])
    nearest[..., 1:] = pairs.diagonal(-1, -2, -1)
    nearest[:, :, 1:, 0] = (g[:, :, 1:, 0] * v[:, :, :-1, -1]).sum(-1)
    nearest = nearest[..., None]
    own = pairs - nearest
    before = factors.since * kept.mass_at[..., None, :]
    dq = _met(own, arrived.addcmul(nearest, before, value=-1), parts, factors)[1]
    return _returned(own, q, _mass_gradient(dq, q, kept.mass), factors)


def _between(sums: Tensor, mass: Tensor, adjoint: PrefixState) -> Tensor:
    """Return S·Λ + M λ."""
    return (sums * adjoint.sums).sum(-1) + mass * adjoint.mass


def _returned(pairs: Tensor, q: Tensor, dmass: Tensor | None, factors: Factors) -> list[Tensor]:
    """Return the gradients of what first halves write, level by level."""
    found: list[Tensor] = []
    for level in factors.levels:
        queries = halves(q, level.size)[1] * level.since
        own = quadrants(pairs, level.size).flatten(2, 3).mT @ queries
        if dmass is not None:
            own += (halves(dmass, level.size)[1] * level.since).sum(-2, keepdim=True)
        found.append(own)
    return found


def _passing_in_all(
    w: Tensor, flow: _Flow, factors: Factors, kept: Kept, distances: Distances
) -> Tensor:
    """Return Σ u over positions: every pair as often as there are decays between the two.

    With mass normalisation all that reaches a query adds up to 0, so that each pair counts once
    less: the nearest, which are large and cancel where β is small, not at all.
    """
    q, dmass, behind = flow.q, flow.dmass, flow.behind
    less = 0 if dmass is None else 1
    ending = q * flow.arrived
    if dmass is not None:
        ending.addcmul_(dmass, factors.since * kept.mass_at[..., None, :])
    total = (distances.since * ending).sum((0, 2, 3))
    total += ((distances.until - less) * (w * flow.left)).sum((0, 2, 3))
    levels = zip(factors.levels, flow.parts, flow.met, flow.returned, strict=True)
    for level, part, met, returned in levels:
        size = level.size
        place = distances.since[:size]
        gained = halves(q, size)[1] * met
        if dmass is not None:
            gained.addcmul_(halves(dmass, size)[1], part.sum(-2, keepdim=True))
        total += (place * level.since * gained).sum((0, 2, 3))
        total += ((size - less - place) * (part * returned)).sum((0, 2, 3))
    through = (kept.sums_at * behind.sums).sum(-1) + kept.mass_at * behind.mass
    return total + (distances.whole * factors.whole.to(w.dtype) * through).sum((0, 2))


def _passing_by_token(
    w: Tensor,
    dw: Tensor,
    q: Tensor,
    dq: Tensor,
    dmass: Tensor | None,
    kept: Kept,
    behind: PrefixState,
) -> Tensor:
    """Return u behind each position: u_i = u_(i+1) + q_i dq_i + M_i dM_i − w_i dw_i."""
    step = -w * dw
    if dmass is None:
        # With mass normalisation q dq and M dM cancel.
        step.addcmul_(q, dq)
    later = step.flip(-2).cumsum(-2).flip(-2) - step
    return _at_ends(kept, behind)[..., None, :] + later


def _at_ends(kept: Kept, behind: PrefixState) -> Tensor:
    """Return S·Λ + M λ behind each block."""
    inner = (kept.sums_at[:, :, 1:] * behind.sums[:, :, :-1]).sum(-1)
    inner += kept.mass_at[:, :, 1:] * behind.mass[:, :, :-1]
    last = (kept.end_sums * behind.sums[:, :, -1]).sum(-1)
    last += kept.end_mass * behind.mass[:, :, -1]
    return torch.cat([inner, last[:, :, None]], 2)


def _adjoints(
    read: Tensor, dmass: Tensor | None, factors: Factors, after: PrefixState
) -> tuple[PrefixState, PrefixState]:
    """Return the gradients of the state at the start, and of that behind each block."""
    blocks, wholes = read.shape[2], factors.whole.to(read.dtype)
    lost = None if dmass is None else (dmass * factors.since).sum(-2)
    if not tiles.in_cache(read):
        return _adjoints_at_once(read, lost, factors.whole.expand(-1, -1, blocks, -1), after)
    sums, mass = [after.sums], [after.mass]
    for n in reversed(range(blocks)):
        whole = wholes[:, :, min(n, wholes.shape[2] - 1)]
        sums.append(torch.addcmul(read[:, :, n], whole[..., None], sums[-1]))
        carried = whole * mass[-1]
        mass.append(carried if lost is None else carried + lost[:, :, n])
    behind = PrefixState(torch.stack(sums[-2::-1], 2), torch.stack(mass[-2::-1], 2))
    return PrefixState(sums[-1], mass[-1]), behind


def _adjoints_at_once(
    read: Tensor, lost: Tensor | None, whole: Tensor, after: PrefixState
) -> tuple[PrefixState, PrefixState]:
    x = joined(PrefixState(read, torch.zeros_like(read[..., 0]) if lost is None else lost))
    last = joined(after)
    # What comes after all goes into the last block, which is the first of the chain.
    x[:, :, -1] += whole[:, :, -1, :, None].to(x.dtype) * last
    found = chained(x.flip(2), whole.flip(2)).flip(2)
    behind = torch.cat([found[:, :, 1:], last[:, :, None]], 2)
    return of_joined(found[:, :, 0]), of_joined(behind)


class BlockwiseMean(torch.autograd.Function):
    """``apply(w, r, v, beta, sums, mass, normalise, groups)``: out, and the sums and mass behind.

    beta is [R], or [B, T, R], then from 0 (which cuts what is before it off) to 1 (which leaves a
    position out).
    """

    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        r: Tensor,
        v: Tensor,
        beta: Tensor,
        sums: Tensor | None,
        mass: Tensor | None,
        normalise: bool,
        groups: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return out, and the sums and the mass behind the last position."""
        length, size = w.shape[1], block_size(w.shape[1])
        w_, r_, v_ = (blocks_of(x, groups, size) for x in (w, r, v))
        factors = _factors(beta, length, size, groups)
        state = None
        if sums is not None and mass is not None:
            state = _by_group(sums, mass, groups)
        out, kept = block_means(w_, r_, v_, factors, state, normalise)
        ctx.save_for_backward(w, r, v, beta, *kept)
        ctx.normalise, ctx.groups, ctx.fresh = normalise, groups, state is None
        return rows_of(out, length), kept.end_sums.flatten(1, 2), kept.end_mass.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of every tensor that went in."""
        w, r, v, beta, *kept = ctx.saved_tensors
        length, size, groups = w.shape[1], block_size(w.shape[1]), ctx.groups
        w_, r_, v_, g_ = (blocks_of(x, groups, size) for x in (w, r, v, grad_outputs[0]))
        factors = _factors(beta, length, size, groups)
        after = _by_group(grad_outputs[1], grad_outputs[2], groups)
        distances = None if beta.ndim == 3 else Distances.of(length, size, beta)
        found = block_gradients(
            w_, r_, v_, g_, factors, Kept(*kept), after, distances, ctx.normalise
        )
        dw, dr, dv = (rows_of(x, length) for x in (found.w, found.r, found.v))
        if beta.ndim == 3:
            dbeta = _token_decay_gradient(found.passing, beta, length)
        else:
            dbeta = found.passing.flatten() / beta
        state = (None if ctx.fresh else x.flatten(1, 2) for x in found.state)
        return dw, dr, dv, dbeta, *state, None, None


def blockwise_mean(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor,
    state: PrefixState | None,
    normalise: bool,
    groups: int,
) -> tuple[Tensor, PrefixState]:
    """Apply :class:`BlockwiseMean`."""
    call = cast(Any, BlockwiseMean.apply)  # pyright: ignore[reportUnknownMemberType]
    out, sums, mass = call(w, r, v, beta, *(state or (None, None)), normalise, groups)
    return out, PrefixState(sums, mass)


def block_size(length: int) -> int:
    """Return C: 32, or the power of two that a shorter row fits into."""
    return min(BLOCK, 1 << (length - 1).bit_length())


def _by_group(sums: Tensor, mass: Tensor, groups: int) -> PrefixState:
    parts = (len(mass), groups, -1)
    return PrefixState(sums.reshape(*parts, sums.shape[-1]), mass.reshape(parts))


def _factors(beta: Tensor, length: int, size: int, groups: int) -> Factors:
    if beta.ndim == 1:
        return channel_factors(beta.reshape(groups, -1), length, size)
    return token_factors(blocks_of(beta, groups, size, fill=1.0))


def _token_decay_gradient(passing: Tensor, beta: Tensor, length: int) -> Tensor:
    behind = rows_of(passing, length)
    cut = beta == 0
    return (behind / beta.masked_fill(cut, 1)).masked_fill_(cut, 0)
