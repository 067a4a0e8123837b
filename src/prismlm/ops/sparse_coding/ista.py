"""Sparse coding by matrix products."""

from __future__ import annotations

import math
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError


def check_settings(step: float, threshold: float, steps: int) -> None:
    """Raise InputError unless step > 0, θ ≥ 0, both finite, and there is at least one step."""
    if not (step > 0 and math.isfinite(step)):
        raise InputError(f"the step size of sparse coding is {step}: expected a positive number.")
    if not (threshold >= 0 and math.isfinite(threshold)):
        raise InputError(
            f"the threshold θ of sparse coding is {threshold}: expected 0 or a positive number."
        )
    if steps < 1:
        raise InputError(f"sparse coding in {steps} steps: expected at least 1.")


def check_shapes(z: Tensor, dictionary: Tensor, code: Tensor | None) -> None:
    """Raise InputError unless z is [..., d], the dictionary [d, m] and the code [..., m]."""
    if dictionary.ndim != 2 or 0 in dictionary.shape or z.shape[-1:] != dictionary.shape[:1]:
        raise InputError(
            f"z is {list(z.shape)} and the dictionary {list(dictionary.shape)}: expected [..., d] "
            "and [d, m], none of them 0."
        )
    expected = (*z.shape[:-1], dictionary.shape[1])
    if code is not None and code.shape != expected:
        raise InputError(f"the code is {list(code.shape)}: expected {list(expected)}.")


def sparse_code(
    z: Float[Tensor, "*batch d"],
    dictionary: Float[Tensor, "d m"],
    *,
    step: float,
    threshold: float,
    steps: int,
    start: Float[Tensor, "*batch m"] | None = None,
) -> Float[Tensor, "*batch m"]:
    """Return a code of z after proximal gradient steps on the non-negative LASSO.

        a ← ReLU(a + step · (Dᵀ(z − D a) − θ)),   which minimises ½‖z − D a‖² + θ Σ a over a ≥ 0

    Columns of D are atoms. From 0 (without ``start``) the first step needs no D a. From a = z with
    a square D, one step is CRATE's ISTA block, ReLU(z + step·Dᵀ(z − D z) − step·θ).

    Source: Yu et al., White-Box Transformers via Sparse Rate Reduction, JMLR 25 (2024), for the
    step; Yang et al., Scaling White-Box Transformers for Vision (NeurIPS 2024), for an overcomplete
    D with codes that start at 0.
    """
    check_settings(step, threshold, steps)
    check_shapes(z, dictionary, start)
    code = start
    for _ in range(steps):
        error = z if code is None else z - F.linear(code, dictionary)
        change = step * (error @ dictionary - threshold)
        code = torch.relu(change if code is None else code + change)
    assert code is not None
    return code


def largest_step(dictionary: Float[Tensor, "d m"]) -> float:
    """Return 1/‖D‖₂²: steps up to it never raise the objective, whatever is coded."""
    d = dictionary.detach().double()
    gram = d @ d.mT if d.shape[0] <= d.shape[1] else d.mT @ d
    values = cast(Tensor, torch.linalg.eigvalsh(gram))  # pyright: ignore[reportUnknownMemberType]
    return 1 / float(values[-1])
