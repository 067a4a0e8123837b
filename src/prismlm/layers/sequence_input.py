"""What the mixers of recurrent decoders take: rows of positions, and flags beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from prismlm.errors import InputError


def check_sequence(x: Tensor, width: int, mask: Tensor | None, starts: Tensor | None) -> None:
    """Check the input of a mixer before anything is computed from it.

    Args:
        x: [B, T, d], of at least one row and one position.
        width: d.
        mask: bool [B, T], False on padding, or None.
        starts: bool [B, T], or None.

    Raises:
        InputError: another shape, or flags that are not bool.
    """
    if x.ndim != 3 or x.shape[2] != width or 0 in x.shape:
        raise InputError(
            f"the input of the mixer is {list(x.shape)}: expected [B, T, {width}], with at least "
            "one row and one position."
        )
    batch, length = x.shape[:2]
    for name, flags in (("mask", mask), ("starts", starts)):
        if flags is not None and (flags.shape != (batch, length) or flags.dtype != torch.bool):
            raise InputError(
                f"{name} is {flags.dtype} {list(flags.shape)}: expected torch.bool "
                f"[{batch}, {length}], one flag for each position. {name}.bool() makes one of "
                "zeros and ones."
            )
