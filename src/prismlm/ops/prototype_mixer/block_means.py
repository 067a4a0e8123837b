"""The forward pass of the prefix mean in blocks of C positions.

Within a block, the scores Σ_k q_ik β_k^(i−j) w_jk of all pairs are matrix products; what comes from
before a block reaches it through the block's state. No product of decays is above 1: a pair of
positions j < i of a block is met at one level h of 1, 2, 4, … C/2, where j is in the first and i in
the second half of a stretch of 2h positions. The decay between them is then taken apart at the
middle: from j to the end of its half, and from the start of the other half to i. Both are products
of decays, so neither overflows, however fast channels forget.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from prismlm.ops import tiles
from prismlm.ops.prototype_mixer.state import EMPTY_BELOW, PrefixState


class Level(NamedTuple):
    """The decay between the halves of stretches of 2h positions.

    Attributes:
        size: h.
        until: β_j … β_e for position j of a first half that ends with e; [B, G, m, h, R].
        since: β_s … β_(i−1) for position i of a second half that starts with s; likewise.
    """

    size: int
    until: Tensor
    since: Tensor


class Factors(NamedTuple):
    """The decay within blocks of C positions; B and n are 1 where all rows and blocks are alike.

    Attributes:
        levels: those of halves, the smallest first.
        until: β_j … β_e for position j of a block that ends with e; [B, G, n, C, R].
        since: β_s … β_(i−1) for position i of a block that starts with s; likewise.
        whole: β_s … β_e; [B, G, n, R], float64: rounded, it would be wrong by the same in every
            block, and after a thousand of them by a thousand times that.
    """

    levels: tuple[Level, ...]
    until: Tensor
    since: Tensor
    whole: Tensor


def channel_factors(decay: Tensor, length: int, size: int) -> Factors:
    """Return the factors of decays [G, R] for ``length`` positions in blocks of ``size``."""
    steps = torch.arange(size + 1, device=decay.device)
    powers = decay[None, :, None, None] ** steps[:, None]
    until, since = powers[..., 1:, :].flip(-2), powers[..., :-1, :]
    levels = tuple(Level(h, until[..., size - h :, :], since[..., :h, :]) for h in _levels(size))
    exact = _wide(decay)[None, :, None]
    whole = exact**size
    last = length % size
    if last:
        # The last block is filled up with positions that must not count as steps of decay.
        blocks = length // size
        short = powers[..., (last - steps[:-1]).clamp_min(0), :]
        until = torch.cat([until.expand(-1, -1, blocks, -1, -1), short], 2)
        whole = torch.cat([whole.expand(-1, -1, blocks, -1), exact**last], 2)
    return Factors(levels, until, since, whole)


def token_factors(decay: Tensor) -> Factors:
    """Return the factors of decays [B, G, n, C, R], 1 where a block is filled up."""
    shape = decay.shape
    until = decay.reshape(*shape[:2], -1, 1, shape[-1])
    since = torch.ones_like(until)
    levels: list[Level] = []
    for h in _levels(shape[3]):
        first, second = halves(until, h)
        before, behind = halves(since, h)
        levels.append(Level(h, first, behind))
        until = torch.cat([first * second[..., :1, :], second], -2)
        since = torch.cat([before, first[..., :1, :] * behind], -2)
    return Factors(tuple(levels), until, since, _wide(decay).prod(-2))


def halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the halves of stretches, [B, G, n, C, F] as twice [B, G, m, h, F]: views of x."""
    parts = x.view(*x.shape[:2], -1, 2, size, x.shape[-1])
    return parts[:, :, :, 0], parts[:, :, :, 1]


def quadrants(scores: Tensor, size: int) -> Tensor:
    """Return where second halves meet first halves: of [B, G, n, C, C] the [B, G, n, m, h, h]."""
    count = scores.shape[-1] // (2 * size)
    parts = scores.view(*scores.shape[:3], count, 2 * size, count, 2 * size)
    return parts.diagonal(dim1=3, dim2=5)[..., size:, :size, :].movedim(-1, 3)


def blocks_of(x: Tensor, groups: int, size: int, fill: float = 0.0) -> Tensor:
    """Return [B, T, F] as [B, G, n, C, F / G]."""
    batch, length, features = x.shape
    x = F.pad(x, (0, 0, 0, -length % size), value=fill) if length % size else x
    x = x.reshape(batch, -1, size, groups, features // groups)
    return x.permute(0, 3, 1, 2, 4)


def rows_of(x: Tensor, length: int) -> Tensor:
    """Return [B, G, n, C, F] as the [B, T, G·F] that it came from."""
    batch, groups, blocks, size, features = x.shape
    rows = x.permute(0, 2, 3, 1, 4).reshape(batch, blocks * size, groups * features)
    return rows[:, :length]


def _wide(decay: Tensor) -> Tensor:
    """Return float64, which Apple's GPUs do not have."""
    return decay if decay.device.type == "mps" else decay.double()


def _levels(size: int) -> list[int]:
    return [1 << n for n in range(size.bit_length() - 1)]


class Kept(NamedTuple):
    """What a forward pass leaves for the backward pass.

    Attributes:
        mass: of every position, [B, G, n, C, R].
        sums_at, mass_at: the state at each block's start.
        end_sums, end_mass: the state behind the last.
    """

    mass: Tensor
    sums_at: Tensor
    mass_at: Tensor
    end_sums: Tensor
    end_mass: Tensor


def block_means(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    factors: Factors,
    state: PrefixState | None,
    normalise: bool,
) -> tuple[Tensor, Kept]:
    """Return the means of positions in blocks, [B, G, n, C, D], and what gradients need of them."""
    (sums_at, mass_at), end = _states(w, v, factors, state)
    masses = factors.since * mass_at[..., None, :]
    parts = halves_written(w, factors)
    for level, part in zip(factors.levels, parts, strict=True):
        _, behind = halves(masses, level.size)
        behind.addcmul_(level.since, part.sum(-2, keepdim=True))
    q = over_mass(r, masses) if normalise else r
    scores = pair_scores(q, parts, factors)
    out = torch.baddbmm(
        ((q * factors.since) @ sums_at).flatten(0, 2),
        scores.flatten(0, 2),
        v.flatten(0, 2),
    )
    return out.reshape(v.shape), Kept(masses, sums_at, mass_at, *end)


def _states(
    w: Tensor, v: Tensor, factors: Factors, state: PrefixState | None
) -> tuple[PrefixState, PrefixState]:
    """Return the states at each block's start, and the one behind the last."""
    keys = w * factors.until
    written, gained = keys.mT @ v, keys.sum(-2)
    if tiles.in_cache(w):
        at, end = _one_after_another(written, gained, factors.whole.to(w.dtype))
    else:
        behind = chained(joined(PrefixState(written, gained)), factors.whole)
        at = of_joined(F.pad(behind[:, :, :-1], (0, 0, 0, 0, 1, 0)))
        end = of_joined(behind[:, :, -1])
    if state is None:
        return at, end
    # The tile's own sums are added up first: in long rows that keeps more digits.
    left = factors.whole.expand(-1, -1, w.shape[2], -1).cumprod(2).to(w.dtype)
    before = torch.cat([torch.ones_like(left[:, :, :1]), left[:, :, :-1]], 2)
    at.sums.addcmul_(before[..., None], state.sums[:, :, None])
    at.mass.addcmul_(before, state.mass[:, :, None])
    return at, PrefixState(
        torch.addcmul(end.sums, left[:, :, -1, :, None], state.sums),
        torch.addcmul(end.mass, left[:, :, -1], state.mass),
    )


def _one_after_another(
    written: Tensor, gained: Tensor, wholes: Tensor
) -> tuple[PrefixState, PrefixState]:
    sums, mass = [torch.zeros_like(written[:, :, 0])], [torch.zeros_like(gained[:, :, 0])]
    for n in range(written.shape[2]):
        whole = wholes[:, :, min(n, wholes.shape[2] - 1)]
        sums.append(torch.addcmul(written[:, :, n], whole[..., None], sums[-1]))
        mass.append(torch.addcmul(gained[:, :, n], whole, mass[-1]))
    at = PrefixState(torch.stack(sums[:-1], 2), torch.stack(mass[:-1], 2))
    return at, PrefixState(sums[-1], mass[-1])


def chained(x: Tensor, whole: Tensor) -> Tensor:
    """Return y_n = β_n y_(n−1) + x_n of all blocks n in log₂ n steps, where y_(−1) = 0.

    For GPUs, on which starting an operation for each block takes far longer than the sums do. In
    step s every y_n has what the last 2^s blocks give it: no product of decays is above 1.

    Args:
        x: [B, G, n, R, F].
        whole: β, [B, G, n, R], or n of 1 where all blocks are alike; float64.
    """
    factor, reach = whole.expand(-1, -1, x.shape[2], -1), 1
    while reach < x.shape[2]:
        carried = factor[:, :, reach:, :, None].to(x.dtype)
        later = torch.addcmul(x[:, :, reach:], carried, x[:, :, :-reach])
        x = torch.cat([x[:, :, :reach], later], 2)
        factor = torch.cat([factor[:, :, :reach], factor[:, :, reach:] * factor[:, :, :-reach]], 2)
        reach *= 2
    return x


def joined(state: PrefixState) -> Tensor:
    """Return sums and mass as one tensor, [..., R, D + 1]."""
    return torch.cat([state.sums, state.mass[..., None]], -1)


def of_joined(x: Tensor) -> PrefixState:
    """Return the sums and the mass of :func:`joined`, which keep nothing else of it."""
    return PrefixState(x[..., :-1].contiguous(), x[..., -1].contiguous())


def halves_written(w: Tensor, factors: Factors) -> list[Tensor]:
    """Return what first halves write, as of their end, level by level."""
    return [halves(w, level.size)[0] * level.until for level in factors.levels]


def pair_scores(q: Tensor, parts: list[Tensor], factors: Factors) -> Tensor:
    """Return Σ_k q_ik β_k^(i−j) w_jk for j < i, and 0 elsewhere: [B, G, n, C, C]."""
    scores = q.new_zeros(*q.shape[:-1], q.shape[-2])
    for level, part in zip(factors.levels, parts, strict=True):
        queries = halves(q, level.size)[1] * level.since
        place = quadrants(scores, level.size)
        place.copy_((queries @ part.mT).reshape(place.shape))
    return scores


def over_mass(r: Tensor, mass: Tensor) -> Tensor:
    """Return r / mass, and 0 where there is no mass."""
    empty = mass < EMPTY_BELOW
    return (r / mass.masked_fill(empty, 1)).masked_fill_(empty, 0)
