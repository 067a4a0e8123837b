"""The forward pass of the prefix mean in blocks.

Within a block, the scores Σ_k q_ik β_k^(i−j) w_jk of all pairs are matrix products, level by level
of :mod:`factors`; what comes from before a block reaches it through the block's state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prismlm.ops.prototype_mixer.factors import Factors, halves, quadrants
from prismlm.ops.prototype_mixer.state import EMPTY_BELOW, PrefixState


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
    sums, mass = [torch.zeros_like(written[:, :, 0])], [torch.zeros_like(gained[:, :, 0])]
    wholes = factors.whole.to(w.dtype)
    for n in range(w.shape[2]):
        whole = wholes[:, :, min(n, wholes.shape[2] - 1)]
        sums.append(torch.addcmul(written[:, :, n], whole[..., None], sums[-1]))
        mass.append(torch.addcmul(gained[:, :, n], whole, mass[-1]))
    at = PrefixState(torch.stack(sums[:-1], 2), torch.stack(mass[:-1], 2))
    end = PrefixState(sums[-1], mass[-1])
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
