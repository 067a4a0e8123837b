"""The prefix mean of some positions of some rows, in blocks, with gradients by hand."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable  # pyright: ignore[reportUnknownVariableType]

from prismlm.ops.prototype_mixer.block_gradients import Distances, block_gradients
from prismlm.ops.prototype_mixer.block_means import Kept, block_means
from prismlm.ops.prototype_mixer.factors import (
    Factors,
    blocks_of,
    channel_factors,
    rows_of,
    token_factors,
)
from prismlm.ops.prototype_mixer.state import PrefixState

BLOCK = 32


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
