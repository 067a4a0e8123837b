"""The prototype head as its equations; for tests."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor
from torch.nn import functional as F

from prismlm.ops.prototype_head.fitted import PICKS, RIDGE
from prismlm.ops.prototype_head.routing import Routing, inverse_norms
from prismlm.ops.tensors import at_least_float32


def route(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
    mask: Bool[Tensor, " N"] | None = None,
) -> Routing:
    """Route every state to its k nearest prototypes; same contract as :func:`fast.route`.

    c_ni = z_n·p_i / (‖z_n‖ ‖p_i‖) in float64, rounded to the dtype that routing computes in; ties
    go to the lower index.
    """
    z64, p64 = z.double(), prototypes.double()
    unit_z, unit_p = z64 * inverse_norms(z64), p64 * inverse_norms(p64)
    # Summed pair by pair: a matrix product may round equal prototypes differently.
    cosines = (unit_z[:, None] * unit_p).sum(-1).to(at_least_float32(z).dtype)
    # Stable sorts keep the lower index first.
    indices = cosines.sort(dim=1, descending=True, stable=True).indices[:, :k]
    selected = cosines.gather(1, indices)
    nearest = indices.new_full((len(prototypes),), -1)
    nearest_cosine = cosines.new_full((len(prototypes),), -1.0)
    allowed = torch.arange(len(z)) if mask is None else mask.nonzero().squeeze(1)
    if len(allowed):
        columns = cosines[allowed].sort(dim=0, descending=True, stable=True)
        nearest, nearest_cosine = allowed[columns.indices[0]], columns.values[0]
    activations = torch.relu(scale * selected)
    return Routing(indices, selected, activations, selected[:, 0], nearest, nearest_cosine)


def reconstruct(routing: Routing, prototypes: Float[Tensor, "K d"]) -> Float[Tensor, "N d"]:
    """Return ẑ_n = Σ_i α_ni p_i over the selected prototypes of each state."""
    return (routing.activations[..., None] * prototypes[routing.indices]).sum(1)


def pursue(z: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"], k: int) -> list[list[int]]:
    """Return each state's prototypes in the order of choice, as :func:`fitted.pursue` does."""
    unit = prototypes * inverse_norms(prototypes)
    results: list[list[int]] = []
    for state in z:
        chosen: list[int] = []
        while len(chosen) < k:
            error = state
            if chosen:
                weights = fit_weights(state[None], unit, torch.tensor([chosen]))[0]
                error = state - weights @ unit[chosen]
            scores = (unit @ error).index_fill(
                0, torch.tensor(chosen, dtype=torch.long), -torch.inf
            )
            order = scores.sort(descending=True, stable=True).indices
            chosen += map(int, order[: min(PICKS, k - len(chosen))])
        results.append(chosen)
    return results


def fit_weights(
    z: Float[Tensor, "N d"], unit: Float[Tensor, "K d"], indices: Int64[Tensor, "N k"]
) -> Float[Tensor, "N k"]:
    """Return the weights; same contract as :func:`fitted.fit_weights`.

    SciPy solves the least squares with √λ I below Uᵀ; the positive weights then solve
    (U_A U_Aᵀ + λ) w_A = U_A z, which gives the gradient.
    """
    scipy: Any = optimize
    rows: list[Tensor] = []
    for state, chosen in zip(z, indices, strict=True):
        vectors = unit[chosen]
        ridge = RIDGE * torch.eye(len(chosen), dtype=z.dtype)
        gram, along = vectors @ vectors.T + ridge, vectors @ state
        matrix = torch.cat([vectors.T, ridge.sqrt()]).detach().numpy()
        weights = scipy.nnls(matrix, F.pad(state, (0, len(chosen))).detach().numpy())[0]
        positive = torch.as_tensor(weights).nonzero().squeeze(1)
        solved = cast(
            "Tensor",
            torch.linalg.solve(gram[positive][:, positive], along[positive]),  # pyright: ignore[reportUnknownMemberType]
        )
        rows.append(torch.zeros_like(along).index_put((positive,), solved))
    return torch.stack(rows)


def diversity(prototypes: Float[Tensor, "K d"]) -> Float[Tensor, ""]:
    """Return the mean squared cosine over ordered pairs of different prototypes."""
    unit = prototypes * inverse_norms(prototypes)
    different = ~torch.eye(len(unit), dtype=torch.bool)
    squares = (unit[:, None] * unit).sum(-1).square()[different]
    return squares.mean() if len(unit) > 1 else squares.sum()
