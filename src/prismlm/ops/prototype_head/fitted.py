"""Matching pursuit: prototypes that reconstruct a state well, and their fitted weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import check_whole
from prismlm.ops import tiles
from prismlm.ops.prototype_head import fast
from prismlm.ops.prototype_head.routing import Nearest, inverse_norms, unit_rows
from prismlm.ops.tensors import at_least_float32

# λ, where a unit prototype has a squared norm of 1: nearly equal prototypes share their weight.
RIDGE = 1e-3
# Prototypes chosen per pass over the bank.
PICKS = 16
# States per tile on a CPU, whose cache holds their prototypes; on a GPU, elements per tile.
STATES, ELEMENTS_OF_GPU = 256, 2**27
# Rounds of sign changes: at most 7 were observed with d > k. On a CPU, where the number of wrong
# signs is known without a wait, rounds end once it is 0.
ROUNDS, MAX_ROUNDS = 16, 1000


def pursue(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    first: Int64[Tensor, "N f"],
) -> Nearest:
    """Choose the prototypes of each state by non-negative orthogonal matching pursuit.

        S ← the nearest;  until k are chosen:   r = z − Σ_{j ∈ S} w_j u_j, w by :func:`fit_weights`
                                                S ← S ∪ {the 16 largest r·u_i, i ∉ S}

    Unlike the k nearest prototypes, these avoid redundancy and cover more of the state.
    Source: Bruckstein, Elad and Zibulevsky (2008): *On the uniqueness of nonnegative sparse
    solutions to underdetermined systems of equations*; several at a time as in Wang, Kwon and Shim
    (2012): *Generalized orthogonal matching pursuit*.

    Args:
        z: states.
        prototypes: of any norms.
        k: the number to choose.
        first: the min(k, ``PICKS``) nearest to each state.

    Returns:
        Distinct prototypes in the order of choice, their cosines, without gradients, and
        activations α = w / ‖p‖.
    """
    check_whole("the number of prototypes of a state", k, 1, len(prototypes))
    z, bank = at_least_float32(z), at_least_float32(prototypes)
    unit = unit_rows(bank)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        indices, along, weights = _pursued(z, unit, k, first[:, :k])
        cosines = along * inverse_norms(z)
    weights = _with_gradient(z, unit, indices, weights)
    return Nearest(indices, cosines, weights * inverse_norms(bank).squeeze(1)[indices])


def fit_weights(
    z: Float[Tensor, "N d"], unit: Float[Tensor, "K d"], indices: Int64[Tensor, "N k"]
) -> Float[Tensor, "N k"]:
    """Return the non-negative weights of distinct unit prototypes that reconstruct z best.

        w = argmin_{w ≥ 0} ‖z − Σ_j w_j u_j‖² + λ‖w‖²,   u_j = p_j / ‖p_j‖, λ = 10⁻³

    This is strictly convex: w is unique, and equal prototypes have equal weights. Gradients are for
    a constant set of positive weights A. With g = ∂L/∂w, v = (U_A U_Aᵀ + λ)⁻¹ g_A and
    q = Σ_A v_j u_j:

        ∂L/∂z = q        ∂L/∂u_j = v_j (z − ẑ) − w_j q
    """
    z, unit = at_least_float32(z), at_least_float32(unit)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        weights = _pursued(z, unit, indices.shape[1], indices)[2]
    return _with_gradient(z, unit, indices, weights)


def _pursued(z: Tensor, unit: Tensor, k: int, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return k prototypes of every state, their u·z, and their weights."""
    score = fast.score_dtype(z, unit)
    low = unit.to(score) if score != z.dtype and k > PICKS else None
    step = _states_per_tile(z, len(unit), k)
    parts = zip(torch.split(z, step), torch.split(first, step), strict=True)
    results = [_pursue_tile(states, unit, low, k, nearest) for states, nearest in parts]
    indices, along, weights = (torch.cat(column) for column in zip(*results, strict=True))
    return indices, along, weights


def _states_per_tile(z: Tensor, prototypes: int, k: int) -> int:
    elements = max(prototypes, k * z.shape[1])
    return max(1, tiles.at_once(z, STATES * elements, ELEMENTS_OF_GPU) // elements)


def _pursue_tile(
    z: Tensor, unit: Tensor, low: Tensor | None, k: int, added: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n, count = len(z), 0
    indices, rows = added.new_empty(n, k), z.new_empty(n, k, z.shape[1])
    along, weights = z.new_empty(n, k), z.new_ones(n, k)
    gram = z.new_empty(n, k, k)
    while True:
        new, count = slice(count, count + added.shape[1]), count + added.shape[1]
        indices[:, new], new_rows = added, _rows(unit, added)
        rows[:, new] = new_rows
        products = new_rows @ rows[:, :count].mT
        gram[:, new, :count], gram[:, :count, new] = products, products.mT
        # A row times a matrix: ten times as fast as the matrix times a column.
        along[:, new] = (z[:, None] @ new_rows.mT).squeeze(1)
        current = weights[:, :count]
        ridged = _ridged(gram[:, :count, :count])
        current.copy_(solve(ridged, along[:, :count].double(), current > 0))
        if count == k:
            return indices, along, weights
        error = z - (current[:, None] @ rows[:, :count]).squeeze(1)
        added = _nearest(error, unit, low, indices[:, :count], min(PICKS, k - count))


def _rows(unit: Tensor, indices: Tensor) -> Float[Tensor, "n k d"]:
    # Three times as fast as unit[indices].
    return unit.index_select(0, indices.flatten()).view(*indices.shape, unit.shape[1])


def _nearest(error: Tensor, unit: Tensor, low: Tensor | None, chosen: Tensor, count: int) -> Tensor:
    """Return the prototypes with the largest r·u_i that are not chosen yet, [n, count].

    With ``low``, the u_i in low precision, they are the best of twice as many candidates.
    """
    if low is None:
        return fast.largest(fast.scores_of(error, unit).scatter_(1, chosen, -torch.inf), count)[1]
    error = unit_rows(error)
    scores = fast.product(error.to(low.dtype), low).scatter_(1, chosen, -torch.inf)
    columns = fast.largest(scores, min(2 * count, len(unit) - chosen.shape[1]))[1]
    return columns.gather(1, fast.cosines_of(error, unit, columns).topk(count, dim=1).indices)


def solve(
    gram: Float[Tensor, "n k k"], along: Float[Tensor, "n k"], positive: Bool[Tensor, "n k"]
) -> Float[Tensor, "n k"]:
    """Return argmin_{w ≥ 0} ½ wᵀ G w − bᵀ w for every state, G positive definite and b ``along``.

    Block principal pivoting (Kim and Park, 2011: *Fast nonnegative matrix factorization*): all
    weights of the wrong sign are exchanged at once, or only the worst if their number does not
    fall. ``positive`` is a first guess of the positive weights.
    """
    on_cpu = tiles.in_cache(gram) and not torch.compiler.is_compiling()
    fewest = torch.full_like(positive[:, :1], positive.shape[1] + 1, dtype=torch.long)
    bound = torch.finfo(along.dtype).eps * along.shape[1] * along.abs().amax(1, keepdim=True)
    weights, unsolved = torch.zeros_like(along), torch.arange(len(along), device=along.device)
    for _ in range(MAX_ROUNDS if on_cpu else ROUNDS):
        w = _solve_positive(gram, along, positive)
        weights[unsolved] = w
        violation = torch.where(positive, -w, along - bound - (w[:, None] @ gram).squeeze(1))
        wrong = violation > 0
        count = wrong.sum(1, keepdim=True)
        worst = violation == violation.amax(1, keepdim=True)
        positive = torch.logical_xor(positive, wrong & (worst | (count < fewest)))
        fewest = torch.minimum(count, fewest)
        if on_cpu:
            rows = count.squeeze(1).nonzero().squeeze(1)
            if not len(rows):
                break
            gram, along, positive = gram[rows], along[rows], positive[rows]
            fewest, bound, unsolved = fewest[rows], bound[rows], unsolved[rows]
    return weights.clamp_min(0)


def _ridged(gram: Tensor) -> Tensor:
    return gram.double() + RIDGE * torch.eye(gram.shape[1], dtype=torch.float64, device=gram.device)


def _solve_positive(gram: Tensor, along: Tensor, positive: Tensor) -> Tensor:
    """Return G_A⁻¹ b_A of each state, 0 outside A; NaN if G is not finite."""
    both = positive[:, :, None] & positive[:, None]
    masked = torch.where(both, gram, torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device))
    # Without LAPACK's error if a fit diverges, which shows in its loss.
    factor, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(masked))  # pyright: ignore[reportUnknownMemberType]
    solution = torch.cholesky_solve((along * positive)[:, :, None], factor).squeeze(2)
    return solution.masked_fill((failed > 0)[:, None], torch.nan)


def _with_gradient(z: Tensor, unit: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return cast("Tensor", _Weights.apply(z, unit, indices, weights))  # pyright: ignore[reportUnknownMemberType]


class _Weights(torch.autograd.Function):
    """Return the given weights, with gradients through the equations that they solve."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, unit: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(z, unit, indices, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, unit, indices, weights = ctx.saved_tensors
        step = _states_per_tile(z, 0, indices.shape[1])
        tiled = (torch.split(x, step) for x in (indices, weights, grads[0]))
        parts: list[Tensor] = []
        for chosen, w, grad in zip(*tiled, strict=True):
            rows = _rows(unit, chosen)
            parts.append(_solve_positive(_ridged(rows @ rows.mT), grad.double(), w > 0))
        v = torch.cat(parts).to(z.dtype)
        q = fast.gather_sum(indices, v, unit)
        error = z - fast.gather_sum(indices, weights, unit)
        twice = torch.cat([indices, indices])
        factors, rows = torch.cat([v, weights]).flatten(), torch.cat([error, -q])
        pairs = twice.flatten(), fast.states_of(twice)
        return q, fast.scatter_sum(*pairs, factors, rows, len(unit)), None, None
