"""The prototypes that rebuild a state best, by matching pursuit, and their weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.ops import tiles
from prismlm.ops.precision import at_least_float32
from prismlm.ops.prototype_head import fast
from prismlm.ops.prototype_head.routing import Nearest, check_arguments, inverse_norms, unit_rows

# λ, beside the 1 that a unit prototype has with itself: two that are nearly one share their weight.
RIDGE = 1e-3
# Prototypes chosen at a time: one by one would take as many passes over the bank as prototypes.
PICKS = 16
# States pursued together: on a CPU their prototypes' rows stay in cache; on a GPU elements of them.
STATES, ELEMENTS_OF_GPU = 256, 2**27
# Rounds in which weights change sign: 7 are the most that were seen where d > k. Where looking at
# the number of wrong signs costs nothing, there are as many as it takes.
ROUNDS, MOST_ROUNDS = 16, 1000


def pursue(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    first: Int64[Tensor, "N f"],
    inverse: Float[Tensor, "K 1"] | None = None,
) -> Nearest:
    """Return the prototypes of each state by non-negative orthogonal matching pursuit.

        S ← the nearest;  until k are chosen:   r = z − Σ_{j ∈ S} w_j u_j, w by :func:`fit_weights`
                                                S ← S ∪ {the 16 largest r·u_i, i ∉ S}

    The k nearest to the state would say much of it several times and some of it never.
    Source: Bruckstein, Elad and Zibulevsky (2008): *On the uniqueness of nonnegative sparse
    solutions to underdetermined systems of equations*; several at a time as in Wang, Kwon and Shim
    (2012): *Generalized orthogonal matching pursuit*.

    Args:
        z: states.
        prototypes: of any length.
        k: how many to choose.
        first: the min(k, ``PICKS``) nearest to each state.
        inverse: the prototypes' :func:`inverse_norms`, where they are known.

    Returns:
        Different prototypes, in the order of choice, their cosines, without gradients, and
        activations α = w / ‖p‖.
    """
    check_arguments(z, prototypes, k)
    z, bank = at_least_float32(z), at_least_float32(prototypes)
    unit = unit_rows(bank)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        indices, along, weights = _pursued(z, unit, k, first[:, :k])
        cosines = along * inverse_norms(z)
    if torch.is_grad_enabled() and (z.requires_grad or bank.requires_grad):
        weights, inverse = _with_gradient(z, unit, indices, weights), None
    lengths = inverse_norms(bank) if inverse is None else inverse.to(z.dtype)
    return Nearest(indices, cosines, weights * lengths.squeeze(1)[indices])


def fit_weights(
    z: Float[Tensor, "N d"], unit: Float[Tensor, "K d"], indices: Int64[Tensor, "N k"]
) -> Float[Tensor, "N k"]:
    """Return the weights of given unit prototypes, all different in a row, that rebuild z best.

        w = argmin_{w ≥ 0} ‖z − Σ_j w_j u_j‖² + λ‖w‖²,   u_j = p_j / ‖p_j‖, λ = 10⁻³

    It is strictly convex: w is unique, and equal prototypes have equal weights. The gradient is
    that of the solution where no weight is about to become zero or positive. With g = ∂L/∂w, A the
    positive weights, v = (U_A U_Aᵀ + λ)⁻¹ g_A and q = Σ_A v_j u_j:

        ∂L/∂z = q        ∂L/∂u_j = v_j (z − ẑ) − w_j q
    """
    z, unit = at_least_float32(z), at_least_float32(unit)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        weights = _pursued(z, unit, indices.shape[1], indices)[2]
    return _with_gradient(z, unit, indices, weights)


def _pursued(z: Tensor, unit: Tensor, k: int, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return k prototypes of every state, u·z of them, and their weights."""
    score = fast.score_dtype(z, unit)
    low = unit.to(score) if score != z.dtype and k > PICKS else None
    step = _states_together(z, len(unit), k)
    parts = zip(torch.split(z, step), torch.split(first, step), strict=True)
    found = [_pursue_tile(states, unit, low, k, nearest) for states, nearest in parts]
    indices, along, weights = (torch.cat(part) for part in zip(*found, strict=True))
    return indices, along, weights


def _states_together(z: Tensor, prototypes: int, k: int) -> int:
    each = max(prototypes, k * z.shape[1])
    return max(1, tiles.at_once(z, STATES * each, ELEMENTS_OF_GPU) // each)


def _pursue_tile(
    z: Tensor, unit: Tensor, low: Tensor | None, k: int, more: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n, count = len(z), 0
    indices, rows = more.new_empty(n, k), z.new_empty(n, k, z.shape[1])
    along, weights = z.new_empty(n, k), z.new_ones(n, k)
    gram = z.new_empty(n, k, k)
    while True:
        new, count = slice(count, count + more.shape[1]), count + more.shape[1]
        indices[:, new], own = more, _rows(unit, more)
        rows[:, new] = own
        products = own @ rows[:, :count].mT
        gram[:, new, :count], gram[:, :count, new] = products, products.mT
        # Ten times as fast as rows times a column.
        along[:, new] = (z[:, None] @ own.mT).squeeze(1)
        so_far, so_along = weights[:, :count], along[:, :count].double()
        so_far.copy_(solve(_ridged(gram[:, :count, :count]), so_along, so_far > 0))
        if count == k:
            return indices, along, weights
        rest = z - (so_far[:, None] @ rows[:, :count]).squeeze(1)
        more = _nearest(rest, unit, low, indices[:, :count], min(PICKS, k - count))


def _rows(unit: Tensor, indices: Tensor) -> Float[Tensor, "n k d"]:
    # Three times as fast as indexing.
    return unit.index_select(0, indices.flatten()).view(*indices.shape, unit.shape[1])


def _nearest(rest: Tensor, unit: Tensor, low: Tensor | None, taken: Tensor, count: int) -> Tensor:
    """Return the prototypes with the largest r·u_i that are not taken yet, [n, count].

    Of twice as many with the largest scores, where ``low``, the u_i in less precision, choose.
    """
    if low is None:
        return fast.largest(fast.scores_of(rest, unit).scatter_(1, taken, -torch.inf), count)[1]
    rest = unit_rows(rest)
    scores = fast.product(rest.to(low.dtype), low).scatter_(1, taken, -torch.inf)
    columns = fast.largest(scores, min(2 * count, len(unit) - taken.shape[1]))[1]
    return columns.gather(1, fast.cosines_of(rest, unit, columns).topk(count, dim=1).indices)


def solve(
    gram: Float[Tensor, "n k k"], along: Float[Tensor, "n k"], positive: Bool[Tensor, "n k"]
) -> Float[Tensor, "n k"]:
    """Return argmin_{w ≥ 0} ½ wᵀ G w − bᵀ w for every state, G positive definite and b ``along``.

    By block principal pivoting (Kim and Park, 2011: *Fast nonnegative matrix factorization*): all
    weights of the wrong sign change sides at once, or the worst alone where that makes none fewer.
    ``positive`` are the weights expected to be so; where they are not it costs rounds alone.
    """
    looks = tiles.in_cache(gram) and not torch.compiler.is_compiling()
    fewest = torch.full_like(positive[:, :1], positive.shape[1] + 1, dtype=torch.long)
    bound = torch.finfo(along.dtype).eps * along.shape[1] * along.abs().amax(1, keepdim=True)
    weights, left = torch.zeros_like(along), torch.arange(len(along), device=along.device)
    for _ in range(MOST_ROUNDS if looks else ROUNDS):
        w = _solve_positive(gram, along, positive)
        weights[left] = w
        short = torch.where(positive, -w, along - bound - (w[:, None] @ gram).squeeze(1))
        wrong = short > 0
        count = wrong.sum(1, keepdim=True)
        worst = short == short.amax(1, keepdim=True)
        positive = torch.logical_xor(positive, wrong & (worst | (count < fewest)))
        fewest = torch.minimum(count, fewest)
        if looks:
            rest = count.squeeze(1).nonzero().squeeze(1)
            if not len(rest):
                break
            gram, along, positive = gram[rest], along[rest], positive[rest]
            fewest, bound, left = fewest[rest], bound[rest], left[rest]
    return weights.clamp_min(0)


def _ridged(gram: Tensor) -> Tensor:
    return gram.double() + RIDGE * torch.eye(gram.shape[1], dtype=torch.float64, device=gram.device)


def _solve_positive(gram: Tensor, along: Tensor, positive: Tensor) -> Tensor:
    """Return G_A⁻¹ b_A of each state, 0 outside of A; NaN where G is not finite."""
    both = positive[:, :, None] & positive[:, None]
    masked = torch.where(both, gram, torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device))
    # Where a fit diverges, whoever looks at its loss says so; here it would be LAPACK's error.
    factor, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(masked))  # pyright: ignore[reportUnknownMemberType]
    found = torch.cholesky_solve((along * positive)[:, :, None], factor).squeeze(2)
    return found.masked_fill((failed > 0)[:, None], torch.nan)


def _with_gradient(z: Tensor, unit: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return cast("Tensor", _Weights.apply(z, unit, indices, weights))  # pyright: ignore[reportUnknownMemberType]


class _Weights(torch.autograd.Function):
    """Hands out weights that were found, with their gradient through the equations they solve."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, unit: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(z, unit, indices, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, unit, indices, weights = ctx.saved_tensors
        step = _states_together(z, 0, indices.shape[1])
        tiled = (torch.split(of, step) for of in (indices, weights, grads[0]))
        parts: list[Tensor] = []
        for own, w, grad in zip(*tiled, strict=True):
            rows = _rows(unit, own)
            parts.append(_solve_positive(_ridged(rows @ rows.mT), grad.double(), w > 0))
        v = torch.cat(parts).to(z.dtype)
        q = fast.gather_sum(indices, v, unit)
        rest = z - fast.gather_sum(indices, weights, unit)
        twice = torch.cat([indices, indices])
        both, rows = torch.cat([v, weights]).flatten(), torch.cat([rest, -q])
        pairs = twice.flatten(), fast.states_of(twice)
        return q, fast.scatter_sum(*pairs, both, rows, len(unit)), None, None
