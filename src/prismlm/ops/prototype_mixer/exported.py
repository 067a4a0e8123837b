"""The prefix mean without a loop: for exported programs, whose length is a symbol."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prismlm.ops.prototype_mixer.block_means import over_mass
from prismlm.ops.prototype_mixer.state import PrefixState, empty_state

BLOCK = 32
CUT = -1000.0
"""The logarithm of a decay of 0, low enough to be 0 again in float64."""


def _by_group(parts: Any, groups: int) -> Tensor:
    return parts.unflatten(-1, (groups, -1))


def prefix_mean_at_once(
    w: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor,
    state: PrefixState | None,
    normalise: bool,
    groups: int,
) -> tuple[Tensor, PrefixState]:
    """Return the means and the state behind, from the decays between all pairs.

    Of positions within blocks of 32, O(T·32·R), and of blocks, O((T/32)²·R), as differences of
    summed logarithms. Arguments as of :func:`blockwise_mean`.
    """
    batch, length, _ = w.shape
    # Indexed, not reshaped, and one block more than needed: what would decide by T is left out.
    positions = torch.arange(length, device=w.device)
    starts = BLOCK * torch.arange(length // BLOCK + 2, device=w.device)
    places = (starts[:, None] + torch.arange(BLOCK, device=w.device)).clamp_max(length)

    def split(x: Tensor, fill: float = 0.0) -> Tensor:
        parts = F.pad(x, (0, 0, 0, 1), value=fill)[:, places]
        return _by_group(parts, groups).permute(0, 3, 1, 2, 4)

    write, read, values = split(w), split(r), split(v)
    decays = beta if beta.ndim == 3 else beta.expand(1, length, -1)
    log = split(decays, 1.0).double().log().clamp_min(CUT)
    since = log.cumsum(3) - log
    whole = log.sum(3)
    keys = write * (whole[..., None, :] - since).exp().to(w.dtype)
    passed = torch.cat([torch.zeros_like(whole[:, :, :1]), whole.cumsum(2)], 2)
    # From behind each block to the start of each later one, and behind the last.
    between = _of_earlier(passed[:, :, :, None] - passed[:, :, None, 1:]).to(w.dtype)
    between = between.expand(batch, -1, -1, -1, -1)
    sums, mass = empty_state(w, v, groups) if state is None else state
    parts = (batch, groups, sums.shape[1] // groups)
    left = passed.exp().to(w.dtype)
    sums = left[..., None] * sums.reshape(*parts, 1, -1).movedim(3, 2)
    sums = sums + torch.einsum("bgnmr,bgmrd->bgnrd", between, keys.mT @ values)
    mass = left * mass.reshape(*parts, 1).movedim(3, 2)
    mass = mass + torch.einsum("bgnmr,bgmr->bgnr", between, keys.sum(-2))
    pairs = _of_earlier(since[..., :, None, :] - since[..., None, :, :]).to(w.dtype)
    pairs = pairs * write[..., None, :, :]
    reaching = since.exp().to(w.dtype)
    if normalise:
        read = over_mass(read, pairs.sum(-2) + reaching * mass[:, :, :-1, None])
    out = (read[..., None, :] * pairs).sum(-1) @ values + (read * reaching) @ sums[:, :, :-1]
    out = out.permute(0, 2, 3, 1, 4)[:, positions // BLOCK, positions % BLOCK].flatten(2)
    return out, PrefixState(sums[:, :, -1].flatten(1, 2), mass[:, :, -1].flatten(1, 2))


def _of_earlier(log: Tensor) -> Tensor:
    """Return the decays [..., i, j, R] of what is earlier, j < i, and 0 elsewhere."""
    later, earlier = (torch.arange(size, device=log.device) for size in log.shape[-3:-1])
    return log.masked_fill((earlier >= later[:, None])[..., None], -torch.inf).exp()
