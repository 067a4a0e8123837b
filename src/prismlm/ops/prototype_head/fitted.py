"""The prototypes that rebuild a state best, by matching pursuit, and their weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.ops.prototype_head.exact import full_precision, largest, products
from prismlm.ops.prototype_head.routing import check_arguments, eager, inverse_norms, score_dtype
from prismlm.ops.prototype_head.sparse import gather_sum, scatter_sum

# λ, beside the 1 that a unit prototype has with itself: two that are nearly one share their weight.
RIDGE = 1e-3
# States solved together: their prototypes' rows stay in cache.
STATES = 32
# Prototypes chosen at a time: one by one would take as many passes over the bank as prototypes.
PICKS = 16
# Scores of states and prototypes held at a time: 64 MiB.
SCORES = 2**24
# How often the number of wrong signs may stay as it is before they are turned one by one.
PATIENCE = 3
# Rounds for each prototype of a state; none has been seen to need more than a tenth of that.
ROUNDS = 10


@eager
@torch.no_grad()
def pursue(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    first: Int64[Tensor, "N f"],
    inverse: Float[Tensor, "K 1"] | None = None,
) -> Int64[Tensor, "N k"]:
    """Return the prototypes of each state by non-negative orthogonal matching pursuit.

        S ← the nearest;  until k are chosen:   r = z − Σ_{j ∈ S} w_j u_j, w by :func:`fit_weights`
                                                S ← S ∪ {the 16 largest r·u_i, i ∉ S}

    The first are the nearest to the state, the next the nearest to what those leave of it, and so
    on. The k nearest to the state would say much of it several times and some of it never.
    One at a time, it is the algorithm of Bruckstein, Elad and Zibulevsky (2008): *On the uniqueness
    of nonnegative sparse solutions to underdetermined systems of equations*; several at a time as
    in Wang, Kwon and Shim (2012): *Generalized orthogonal matching pursuit*.

    Args:
        z: states.
        prototypes: of any length.
        k: how many to choose.
        first: the ``PICKS`` nearest to each state; k of them where k is less.
        inverse: the prototypes' :func:`inverse_norms`, where they are known.

    Returns:
        Different prototypes, in the order of choice. After the first ones, scores that differ by
        less than their rounding are in no particular order.

    Raises:
        InputError: k > K, or widths that differ.
    """
    check_arguments(z, prototypes, k)
    dtype = score_dtype(z.dtype)
    z, bank, chosen = z.to(dtype), prototypes.to(dtype), first[:, :k]
    inverse = inverse_norms(bank) if inverse is None else inverse.to(dtype)
    step = max(1, SCORES // len(bank))
    while chosen.shape[1] < k:
        picks = min(PICKS, k - chosen.shape[1])
        rest = z - gather_sum(chosen, fit_activations(z, bank, chosen), bank)
        more = [chosen[:0, :picks]]
        for part, taken in zip(torch.split(rest, step), torch.split(chosen, step), strict=True):
            with full_precision(z.device):
                scores = products(part, bank).mul_(inverse.T)
            more.append(largest(scores.scatter_(1, taken, -torch.inf), picks)[1])
        chosen = torch.cat([chosen, torch.cat(more)], dim=1)
    return chosen


@torch.no_grad()
def cosines_of(
    z: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"], indices: Int64[Tensor, "N k"]
) -> Float[Tensor, "N k"]:
    """Return the cosines of each state with given prototypes, without gradients."""
    dtype = score_dtype(z.dtype)
    z = z.to(dtype) * inverse_norms(z.to(dtype))
    found = [z.new_empty(0, indices.shape[1])]
    for states, chosen in zip(torch.split(z, STATES), torch.split(indices, STATES), strict=True):
        rows = prototypes[chosen].to(dtype)
        with full_precision(z.device):
            along = (rows @ states[:, :, None]).squeeze(2)
        found.append(along * inverse_norms(rows).squeeze(2))
    return torch.cat(found)


def fit_activations(
    z: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"], indices: Int64[Tensor, "N k"]
) -> Float[Tensor, "N k"]:
    """Return what :func:`fit_weights` does, for prototypes of any length: α = w / ‖p‖."""
    # Of what was chosen alone: for one state the whole bank would take longer than the fit.
    found, places = cast(
        "tuple[Tensor, Tensor]",
        torch.unique(indices, return_inverse=True),  # pyright: ignore[reportUnknownMemberType]
    )
    rows = prototypes[found]
    inverse = inverse_norms(rows)
    return fit_weights(z, rows * inverse, places) * inverse.squeeze(1)[places]


@eager
def fit_weights(
    z: Float[Tensor, "N d"], unit: Float[Tensor, "K d"], indices: Int64[Tensor, "N k"]
) -> Float[Tensor, "N k"]:
    """Return the weights of given prototypes that rebuild each state best.

        w = argmin_{w ≥ 0} ‖z − Σ_j w_j u_j‖² + λ‖w‖²,   u_j = p_j / ‖p_j‖, λ = 10⁻³

    It is strictly convex: w is unique, and equal prototypes have equal weights. Solved by block
    principal pivoting (Kim and Park, 2011: *Fast nonnegative matrix factorization*): all weights of
    the wrong sign change sides at once, one at a time where that does not end.

    The gradient is that of the solution where no weight is about to become zero or positive. With
    g = ∂L/∂w, A the positive weights, v = (U_A U_Aᵀ + λ)⁻¹ g_A and q = Σ_A v_j u_j:

        ∂L/∂z = q        ∂L/∂u_j = v_j (z − ẑ) − w_j q

    Args:
        z: states.
        unit: prototypes of length 1.
        indices: the prototypes of each state, all different in a row.

    Returns:
        float32, or float64 for float64 states.
    """
    dtype = score_dtype(z.dtype)
    found = _Fit.apply(z.to(dtype), unit.to(dtype), indices)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("Tensor", found)


class _Fit(torch.autograd.Function):
    """The weights, and their gradient through the equations that the positive ones solve."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, unit: Tensor, indices: Tensor) -> Tensor:
        """Solve a few states at a time."""
        weights = z.new_empty(indices.shape)
        for start in range(0, len(z), STATES):
            part = slice(start, start + STATES)
            gram, along = _products(z[part], unit, indices[part])
            weights[part] = solve(gram, along).to(z.dtype)
        ctx.save_for_backward(z, unit, indices, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Two sums over the selected pairs; the products are formed anew."""
        (grad,) = grads
        z, unit, indices, weights = ctx.saved_tensors
        v = torch.empty_like(weights)
        for start in range(0, len(z), STATES):
            part = slice(start, start + STATES)
            gram, _ = _products(z[part], unit, indices[part])
            v[part] = _solve_positive(gram, grad[part].double(), weights[part] > 0).to(z.dtype)
        q = gather_sum(indices, v, unit)
        rest = z - gather_sum(indices, weights, unit)
        target = indices.flatten()
        source = torch.arange(len(z), device=z.device).repeat_interleave(indices.shape[1])
        to_unit = scatter_sum(target, source, v.flatten(), rest, len(unit))
        to_unit -= scatter_sum(target, source, weights.flatten(), q, len(unit))
        return q, to_unit, None


def _products(z: Tensor, unit: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return U Uᵀ + λ and U z of each state, in float64: [n, k, k] and [n, k]."""
    rows = unit[indices]
    with full_precision(z.device):
        gram = (rows @ rows.transpose(1, 2)).double()
        along = (rows @ z[:, :, None]).squeeze(2).double()
    gram.diagonal(dim1=1, dim2=2).add_(RIDGE)
    return gram, along


def solve(gram: Float[Tensor, "N k k"], along: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
    """Return argmin_{w ≥ 0} ½ wᵀ G w − bᵀ w for every state.

    Args:
        gram: G, symmetric and positive definite.
        along: b.
    """
    n, k = along.shape
    positive = torch.ones_like(along, dtype=torch.bool)
    weights = torch.zeros_like(along)
    fewest = torch.full((n,), k + 1, device=along.device)
    patience = torch.full_like(fewest, PATIENCE)
    bound = torch.finfo(along.dtype).eps * k * along.abs().amax(1, keepdim=True)
    left = torch.arange(n, device=along.device)
    for _ in range(ROUNDS * k):
        w = _solve_positive(gram[left], along[left], positive[left])
        slope = (gram[left] @ w[:, :, None]).squeeze(2) - along[left]
        wrong = torch.where(positive[left], w < 0, slope < -bound[left])
        weights[left] = w.clamp_min(0)
        count = wrong.sum(1)
        better = count < fewest[left]
        at_once = better | (patience[left] > 0)
        patience[left] = torch.where(better, PATIENCE, patience[left] - 1)
        fewest[left] = torch.minimum(count, fewest[left])
        # The last alone: a rule that cannot come back to where it was.
        last = k - 1 - wrong.flip(1).int().argmax(1)
        alone = torch.zeros_like(wrong).scatter_(1, last[:, None], True) & wrong
        positive[left] ^= torch.where(at_once[:, None], wrong, alone)
        left = left[count > 0]
        if not len(left):
            break
    return weights


def _solve_positive(gram: Tensor, along: Tensor, positive: Tensor) -> Tensor:
    """Return G_A⁻¹ b_A of each state, 0 outside of A."""
    inside = positive.to(gram.dtype)
    masked = gram * inside[:, :, None] * inside[:, None, :]
    masked.diagonal(dim1=1, dim2=2).add_(1 - inside)
    factor = cast("Tensor", torch.linalg.cholesky(masked))  # pyright: ignore[reportUnknownMemberType]
    found = torch.cholesky_solve((along * inside)[:, :, None], factor)
    return found.squeeze(2) * inside
