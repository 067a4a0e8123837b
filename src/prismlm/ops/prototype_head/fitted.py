"""The prototypes that rebuild a state best, by matching pursuit, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.ops.prototype_head.choice import cosines_of, largest, product, score_dtype
from prismlm.ops.prototype_head.fast import products
from prismlm.ops.prototype_head.routing import (
    Nearest,
    at_least_float32,
    check_arguments,
    inverse_norms,
)
from prismlm.ops.prototype_head.sparse import gather_sum, scatter_sum
from prismlm.ops.tiles import at_once

# λ, beside the 1 that a unit prototype has with itself: two that are nearly one share their weight.
RIDGE = 1e-3
# States solved together: their prototypes' rows stay in cache.
STATES = 64
# Prototypes chosen at a time: one by one would take as many passes over the bank as prototypes.
PICKS = 16
# Elements of scores, and of chosen prototypes' rows, held at a time: 64 MiB each, on a GPU 512.
ELEMENTS, ELEMENTS_OF_GPU = 2**24, 2**27
# How often the number of wrong signs may stay as it is before they are turned one by one.
PATIENCE = 3
# Rounds for each prototype of a state; none has been seen to need more than a tenth of that.
ROUNDS = 10

_P = ParamSpec("_P")
_R = TypeVar("_R")


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep a function whose shapes depend on the data out of graphs: torch.compile breaks there."""
    return cast("Callable[_P, _R]", torch.compiler.disable(function))  # pyright: ignore[reportUnknownMemberType]


@eager
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
        Different prototypes, in the order of choice; after the first ones, scores that differ by
        less than their rounding are in no particular order. Their cosines, without gradients, and
        activations α = w / ‖p‖, with those of :func:`fit_weights`.

    Raises:
        InputError: k > K, or widths that differ.
    """
    check_arguments(z, prototypes, k)
    z, bank = at_least_float32(z), at_least_float32(prototypes)
    wanted = _wanted(z, bank)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        lengths = inverse_norms(bank) if inverse is None else inverse.to(z.dtype)
        found = _pursued(z.detach(), bank.detach(), lengths, k, first[:, :k], keep=wanted)
        cosines = found.along * inverse_norms(z)
    if not wanted:
        return Nearest(found.indices, cosines, found.weights * lengths.squeeze(1)[found.indices])
    # Of what was chosen alone: the others have no gradient.
    chosen, places = cast(
        "tuple[Tensor, Tensor]",
        torch.unique(found.indices, return_inverse=True),  # pyright: ignore[reportUnknownMemberType]
    )
    rows = bank[chosen]
    lengths = inverse_norms(rows)
    weights = _with_gradient(z, rows * lengths, places, found)
    return Nearest(found.indices, cosines, weights * lengths.squeeze(1)[places])


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
    z, unit, k = at_least_float32(z), at_least_float32(unit), indices.shape[1]
    wanted = _wanted(z, unit)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        ones = unit.new_ones(len(unit), 1)
        found = _pursued(z.detach(), unit.detach(), ones, k, indices, keep=wanted)
    return _with_gradient(z, unit, indices, found)


class _Found(NamedTuple):
    """What was chosen for states.

    Attributes:
        indices: the prototypes.
        along: U z, where U are these as unit vectors.
        weights: w.
        gram: U Uᵀ, not symmetric to the last bit; of no states where it was not asked for.
    """

    indices: Int64[Tensor, "N k"]
    along: Float[Tensor, "N k"]
    weights: Float[Tensor, "N k"]
    gram: Float[Tensor, "N k k"]


def _pursued(
    z: Tensor, bank: Tensor, inverse: Tensor, k: int, first: Tensor, *, keep: bool
) -> _Found:
    """Choose k prototypes of every state, and fit their weights; ``keep`` their products, too."""
    held = at_once(z, ELEMENTS, ELEMENTS_OF_GPU)
    step = max(1, min(held // len(bank), held // (k * z.shape[1])))
    score = score_dtype(z, bank)
    low = (bank * inverse).to(score) if score != z.dtype and k > PICKS else None
    parts: list[_Found] = []
    # Of no states there is still one part, with the shapes.
    for states, nearest in zip(torch.split(z, step), torch.split(first, step), strict=True):
        chosen = _Chosen(states, bank, inverse, k)
        chosen.take(nearest)
        while chosen.count < k:
            taken, more = chosen.indices[:, : chosen.count], min(PICKS, k - chosen.count)
            chosen.take(_nearest(chosen.rest(), bank, inverse, taken, more, low))
        gram = chosen.gram if keep else chosen.gram[:0]
        parts.append(_Found(chosen.indices, chosen.along, chosen.weights, gram))
    return _Found(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _wanted(z: Tensor, prototypes: Tensor) -> bool:
    """Whether there will be a gradient, for which k² products of each state are kept."""
    return torch.is_grad_enabled() and (z.requires_grad or prototypes.requires_grad)


def _nearest(
    rest: Tensor, bank: Tensor, inverse: Tensor, taken: Tensor, count: int, low: Tensor | None
) -> Tensor:
    """Return the prototypes with the largest r·u_i that are not taken yet, [n, count].

    Of twice as many with the largest scores, where ``low``, the u_i in less precision, choose.
    """
    if low is None:
        scores = products(rest, bank).mul_(inverse.T)
        return largest(scores.scatter_(1, taken, -torch.inf), count)[1]
    unit = rest * inverse_norms(rest)
    scores = product(unit.to(low.dtype), low).scatter(1, taken, -torch.inf)
    columns = largest(scores, min(2 * count, len(bank) - taken.shape[1]))[1]
    cosines = cosines_of(unit, bank, columns) * inverse[columns, 0]
    return columns.gather(1, cosines.topk(count, dim=1).indices)


class _Chosen:
    """The prototypes of some states while they are chosen, with weights that fit so far.

    What is taken is gathered once, and multiplied with what was taken before alone.
    """

    def __init__(self, z: Tensor, bank: Tensor, inverse: Tensor, k: int) -> None:
        n, width = z.shape
        self.z, self.bank, self.inverse = z, bank, inverse.squeeze(1)
        self.count = 0
        self.indices = torch.empty(n, k, dtype=torch.long, device=z.device)
        self.along, self.weights = z.new_empty(n, k), z.new_ones(n, k)
        self.gram, self.rows = z.new_empty(n, k, k), z.new_empty(n, k, width)

    def take(self, more: Tensor) -> None:
        """Take prototypes, and fit the weights of all."""
        old, self.count = self.count, self.count + more.shape[1]
        self.indices[:, old : self.count] = more
        for part in _together(self.z, self.gram.shape[-1]):
            self._multiply(part, old)
            gram = _ridged(self.gram[part, : self.count, : self.count])
            weights = self.weights[part, : self.count]
            weights.copy_(solve(gram, self.along[part, : self.count].double(), weights > 0))

    def _multiply(self, part: slice, old: int) -> None:
        chosen, new = self.indices[part, : self.count], slice(old, self.count)
        rows, inverse = self.rows[part, : self.count], self.inverse[chosen]
        # Three times as fast as indexing.
        found = self.bank.index_select(0, chosen[:, new].flatten())
        rows[:, new] = found.view(len(rows), -1, found.shape[1])
        # Products are made those of unit vectors: there are fewer of them than elements.
        gram = rows[:, new] @ rows.transpose(1, 2)
        # Ten times as fast as rows times a column.
        along = (self.z[part, None] @ rows[:, new].transpose(1, 2)).squeeze(1)
        gram *= inverse[:, new, None] * inverse[:, None, :]
        self.gram[part, new, : self.count] = gram
        self.gram[part, :old, new] = gram[:, :, :old].transpose(1, 2)
        self.along[part, new] = along * inverse[:, new]

    def rest(self) -> Tensor:
        """Return z − ẑ."""
        rows, chosen = self.rows[:, : self.count], self.indices[:, : self.count]
        activations = self.weights[:, : self.count] * self.inverse[chosen]
        return self.z - (activations[:, None] @ rows).squeeze(1)


def _with_gradient(z: Tensor, unit: Tensor, indices: Tensor, found: _Found) -> Tensor:
    weights = _Weights.apply(z, unit, indices, found.weights, found.gram)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("Tensor", weights)


class _Weights(torch.autograd.Function):
    """Hands out weights that were found, with their gradient through the equations they solve."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, unit: Tensor, indices: Tensor, weights: Tensor, gram: Tensor
    ) -> Tensor:
        """Return the weights as they are."""
        ctx.save_for_backward(z, unit, indices, weights, gram)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Two sums over the selected pairs."""
        (grad,) = grads
        z, unit, indices, weights, products_of = ctx.saved_tensors
        v = torch.empty_like(weights)
        for part in _together(z, indices.shape[1]):
            gram, along = _ridged(products_of[part]), grad[part].double()
            v[part] = _solve_positive(gram, along, weights[part] > 0).to(z.dtype)
        q = gather_sum(indices, v, unit)
        rest = z - gather_sum(indices, weights, unit)
        target = indices.flatten()
        source = torch.arange(len(z), device=z.device).repeat_interleave(indices.shape[1])
        to_unit = scatter_sum(target, source, v.flatten(), rest, len(unit))
        to_unit -= scatter_sum(target, source, weights.flatten(), q, len(unit))
        return q, to_unit, None, None, None


def _together(z: Tensor, k: int) -> Iterator[slice]:
    """Yield which states are solved together."""
    size = max(1, at_once(z, STATES * k * k) // (k * k))
    for start in range(0, len(z), size):
        yield slice(start, start + size)


def _ridged(gram: Tensor) -> Tensor:
    """Return G + λ in float64, a copy."""
    gram = gram.to(torch.float64, copy=True)
    gram.diagonal(dim1=1, dim2=2).add_(RIDGE)
    return gram


def solve(
    gram: Float[Tensor, "N k k"], along: Float[Tensor, "N k"], positive: Bool[Tensor, "N k"]
) -> Float[Tensor, "N k"]:
    """Return argmin_{w ≥ 0} ½ wᵀ G w − bᵀ w for every state.

    Args:
        gram: G, symmetric and positive definite.
        along: b.
        positive: where the weights are expected to be so; it costs rounds alone.
    """
    n, k = along.shape
    weights = torch.zeros_like(along)
    fewest = torch.full((n,), k + 1, device=along.device)
    patience = torch.full_like(fewest, PATIENCE)
    bound = torch.finfo(along.dtype).eps * k * along.abs().amax(1, keepdim=True)
    left = torch.arange(n, device=along.device)
    for _ in range(ROUNDS * k):
        w = _solve_positive(gram, along, positive)
        weights[left] = w.clamp_min(0)
        slope = (w[:, None] @ gram).squeeze(1) - along
        wrong = torch.where(positive, w < 0, slope < -bound)
        count = wrong.sum(1)
        rest = count.nonzero().squeeze(1)
        if not len(rest):
            break
        better = count < fewest
        at_once = better | (patience > 0)
        patience = torch.where(better, PATIENCE, patience - 1)
        fewest = torch.minimum(count, fewest)
        # The last alone: a rule that cannot come back to where it was.
        last = k - 1 - wrong.flip(1).int().argmax(1)
        alone = torch.zeros_like(wrong).scatter_(1, last[:, None], True) & wrong
        positive = positive ^ torch.where(at_once[:, None], wrong, alone)
        if len(rest) < len(left):
            gram, along, positive, bound, fewest, patience, left = (
                of[rest] for of in (gram, along, positive, bound, fewest, patience, left)
            )
    return weights


def _solve_positive(gram: Tensor, along: Tensor, positive: Tensor) -> Tensor:
    """Return G_A⁻¹ b_A of each state, 0 outside of A; NaN where G is not finite."""
    inside = positive.to(gram.dtype)
    masked = gram * inside[:, :, None] * inside[:, None, :]
    masked.diagonal(dim1=1, dim2=2).add_(1 - inside)
    # Where a fit diverges, whoever looks at its loss says so; here it would be LAPACK's error.
    factor, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(masked))  # pyright: ignore[reportUnknownMemberType]
    found = torch.cholesky_solve((along * inside)[:, :, None], factor).squeeze(2) * inside
    return found.masked_fill_((failed > 0)[:, None], torch.nan)
