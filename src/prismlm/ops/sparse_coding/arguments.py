"""The checks that every form of sparse coding shares."""

from __future__ import annotations

import math

from torch import Tensor

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
