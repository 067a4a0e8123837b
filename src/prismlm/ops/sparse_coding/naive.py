"""Sparse coding as its equation, one atom at a time; for tests."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.ops.sparse_coding.ista import check_settings, check_shapes


def sparse_code(
    z: Float[Tensor, "*batch d"],
    dictionary: Float[Tensor, "d m"],
    *,
    step: float,
    threshold: float,
    steps: int,
    start: Float[Tensor, "*batch m"] | None = None,
) -> Float[Tensor, "*batch m"]:
    """Return the code after ``steps`` steps; same contract as :func:`ista.sparse_code`.

    a_j ← max(0, a_j + step · (D_j · (z − Σ_k a_k D_k) − θ))
    """
    check_settings(step, threshold, steps)
    check_shapes(z, dictionary, start)
    atoms = dictionary.unbind(1)
    code = [torch.zeros_like(z[..., 0]) for _ in atoms] if start is None else start.unbind(-1)
    for _ in range(steps):
        error = z
        for a, atom in zip(code, atoms, strict=True):
            error = error - a[..., None] * atom
        code = [
            (a + step * ((atom * error).sum(-1) - threshold)).clamp_min(0)
            for a, atom in zip(code, atoms, strict=True)
        ]
    return torch.stack(list(code), -1)
