"""Sparse coding in matrix products."""

from __future__ import annotations

import math
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError


def check_settings(step: float, threshold: float, steps: int) -> None:
    """Raise InputError for a step or a number of steps that gets nowhere, or θ below 0."""
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


def ista_step(
    code: Float[Tensor, "*batch m"],
    z: Float[Tensor, "*batch d"],
    dictionary: Float[Tensor, "d m"],
    *,
    step: float,
    threshold: float,
) -> Float[Tensor, "*batch m"]:
    """Return the code after one proximal gradient step on the non-negative LASSO.

        a ← ReLU(a + step · (Dᵀ(z − D a) − θ))

    With a = z and a square D this is CRATE's ISTA block, ReLU(z + step·Dᵀ(z − D z) − step·θ).

    Source: Yu et al., White-Box Transformers via Sparse Rate Reduction, JMLR 25 (2024).

    Args:
        code: a.
        z: what is to be coded.
        dictionary: D, one atom a column.
        step: at most 1/‖D‖₂² (:func:`largest_step`) never raises the objective (:func:`lasso`).
        threshold: θ, the weight of Σ a in the objective.

    Raises:
        InputError: shapes that do not fit, a step that is not positive, or θ below 0.
    """
    return sparse_code(z, dictionary, step=step, threshold=threshold, steps=1, start=code)


def sparse_code(
    z: Float[Tensor, "*batch d"],
    dictionary: Float[Tensor, "d m"],
    *,
    step: float,
    threshold: float,
    steps: int,
    start: Float[Tensor, "*batch m"] | None = None,
) -> Float[Tensor, "*batch m"]:
    """Return the code after ``steps`` steps of :func:`ista_step`, from 0 or from ``start``.

    From 0 the first step needs no D a, so S steps are 2S − 1 products of a point with D.

    Source: Yu et al. (2024) for the step; Yang et al., Scaling White-Box Transformers for Vision
    (NeurIPS 2024), for an overcomplete D, where codes start at 0.

    Raises:
        InputError: as :func:`ista_step`, or no step at all.
    """
    check_settings(step, threshold, steps)
    check_shapes(z, dictionary, start)
    code = start
    for _ in range(steps):
        rest = z if code is None else z - F.linear(code, dictionary)
        moved = step * (rest @ dictionary - threshold)
        code = torch.relu(moved if code is None else code + moved)
    assert code is not None
    return code


def lasso(
    z: Float[Tensor, "*batch d"],
    code: Float[Tensor, "*batch m"],
    dictionary: Float[Tensor, "d m"],
    *,
    threshold: float,
) -> Float[Tensor, "*batch"]:
    """Return ½‖z − D a‖² + θ Σ a of each point, the objective for codes a ≥ 0.

    Raises:
        InputError: shapes that do not fit, or θ below 0.
    """
    check_settings(1.0, threshold, 1)
    check_shapes(z, dictionary, code)
    rest = z - F.linear(code, dictionary)
    return rest.square().sum(-1) / 2 + threshold * code.sum(-1)


def largest_step(dictionary: Float[Tensor, "d m"]) -> float:
    """Return 1/‖D‖₂²: steps up to it never raise :func:`lasso`, whatever is coded."""
    d = dictionary.detach().double()
    gram = d @ d.mT if d.shape[0] <= d.shape[1] else d.mT @ d
    values = cast(Tensor, torch.linalg.eigvalsh(gram))  # pyright: ignore[reportUnknownMemberType]
    return 1 / float(values[-1])
