"""The checks that every form of signal/noise attention shares."""

from __future__ import annotations

import torch
from torch import Tensor

from prismlm.errors import InputError


def check_arguments(
    u_signal: Tensor,
    u_noise: Tensor,
    noise_weight: float | Tensor,
    rotations: tuple[Tensor, Tensor],
    positions: Tensor | None,
    mask: Tensor | None,
    queries: int | None,
) -> None:
    """Raise InputError for shapes that do not fit together, or a number λ outside of [0, 1]."""
    if u_signal.ndim != 4 or 0 in u_signal.shape or u_noise.shape != u_signal.shape:
        raise InputError(
            f"u_signal is {list(u_signal.shape)} and u_noise {list(u_noise.shape)}: expected "
            "[B, H, S, p] of both, at least one of each."
        )
    batch, _, seen, size = u_signal.shape
    for name, own in zip(("signal", "noise"), rotations, strict=True):
        if size % 2 or own.shape != (size // 2,):
            raise InputError(
                f"{name}_frequencies are {list(own.shape)}: heads of size {size} need one for "
                "each pair of dimensions, and an even size."
            )
    asked = seen if queries is None else queries
    if not 1 <= asked <= seen:
        raise InputError(f"queries is {queries}: expected 1 to {seen}, the positions seen.")
    if positions is not None and positions.shape != (batch, seen):
        raise InputError(f"positions are {list(positions.shape)}: expected {[batch, seen]}.")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, 1, asked, seen)):
        raise InputError(
            f"mask is {mask.dtype} {list(mask.shape)}: expected bool {[batch, 1, asked, seen]}."
        )
    check_noise_weight(noise_weight)


def check_noise_weight(noise_weight: float | Tensor) -> None:
    """Raise InputError for a number λ outside of [0, 1], or a tensor of more than one.

    The value of a tensor is not looked at, which would wait for the device at every call: whoever
    sets it checks it, as ``SignalNoiseModel.set_noise_weight`` does.
    """
    if isinstance(noise_weight, Tensor):
        if noise_weight.numel() != 1:
            raise InputError(f"λ is {list(noise_weight.shape)}: expected one number.")
    elif not 0 <= noise_weight <= 1:
        raise InputError(f"λ is {noise_weight}: expected 0 to 1.")
