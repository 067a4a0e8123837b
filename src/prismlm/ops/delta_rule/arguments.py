"""The checks that every form of the delta rule shares."""

from __future__ import annotations

import torch
from torch import Tensor

from prismlm.errors import InputError


def check_arguments(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rates: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
) -> None:
    """Raise InputError for shapes that do not fit together."""
    if keys.ndim != 4 or 0 in keys.shape:
        raise InputError(
            f"keys must be [B, T, H, K] with at least one of each; got {list(keys.shape)}."
        )
    batch, length, heads, width = keys.shape
    rows = (batch, length, heads)
    if queries.shape != keys.shape or values.ndim != 4 or values.shape[:3] != rows:
        raise InputError(
            f"keys are {list(keys.shape)}, queries {list(queries.shape)} and values "
            f"{list(values.shape)}: expected equal shapes, but for the last size of values."
        )
    if rates.shape != rows:
        raise InputError(f"rates are {list(rates.shape)}: expected {list(rows)}, beside keys.")
    held = (batch, heads, width, values.shape[3])
    if state is not None and state.shape != held:
        raise InputError(
            f"the state is {list(state.shape)} and the input needs {list(held)}: it comes from "
            "another batch or another layer."
        )
    for name, flags in (("mask", mask), ("starts", starts)):
        if flags is not None and (flags.shape != rows[:2] or flags.dtype != torch.bool):
            raise InputError(
                f"{name} must be bool [{batch}, {length}], got {flags.dtype} {list(flags.shape)}."
            )
