"""Sparse coding as its equation, one point and one atom at a time; for tests."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.ops.sparse_coding.ista import check_settings, check_shapes


def ista_step(
    code: Float[Tensor, "*batch m"],
    z: Float[Tensor, "*batch d"],
    dictionary: Float[Tensor, "d m"],
    *,
    step: float,
    threshold: float,
) -> Float[Tensor, "*batch m"]:
    """Return the next code; same contract as :func:`ista.ista_step`.

    a_j ← max(0, a_j + step · (D_j · (z − Σ_k a_k D_k) − θ))
    """
    check_settings(step, threshold, 1)
    check_shapes(z, dictionary, code)
    atoms = range(dictionary.shape[1])
    rows: list[Tensor] = []
    for own, point in zip(code.flatten(0, -2), z.flatten(0, -2), strict=True):
        rest = point
        for k in atoms:
            rest = rest - own[k] * dictionary[:, k]
        moved = [
            own[j] + step * (torch.sum(dictionary[:, j] * rest) - threshold)  # D_j · rest − θ
            for j in atoms
        ]
        rows.append(torch.stack(moved).clamp_min(0))
    return torch.stack(rows).reshape(code.shape)


def sparse_code(
    z: Float[Tensor, "*batch d"],
    dictionary: Float[Tensor, "d m"],
    *,
    step: float,
    threshold: float,
    steps: int,
    start: Float[Tensor, "*batch m"] | None = None,
) -> Float[Tensor, "*batch m"]:
    """Return the code after ``steps`` steps; same contract as :func:`ista.sparse_code`."""
    check_settings(step, threshold, steps)
    check_shapes(z, dictionary, start)
    code = z.new_zeros(*z.shape[:-1], dictionary.shape[1]) if start is None else start
    for _ in range(steps):
        code = ista_step(code, z, dictionary, step=step, threshold=threshold)
    return code
