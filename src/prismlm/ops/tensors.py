"""What ops ask of their tensors: axes that fit together, and the dtype to compute in."""

from __future__ import annotations

import torch
from torch import Tensor

from prismlm.errors import InputError

FLAGS = ("mask", "starts")


def check_axes(**tensors: tuple[str, Tensor | None]) -> None:
    """Raise InputError unless axes of one name have one size: ``check_axes(x=("B T d", x), …)``.

    PyTorch would repeat an axis of size 1, and some sums would end at the shorter tensor: wrong
    numbers without an error. ``mask`` and ``starts`` must be bool; None is not checked.
    """
    sizes: dict[str, int] = {}
    for name, (axes, tensor) in tensors.items():
        if tensor is None:
            continue
        shape, names = list(tensor.shape), axes.split()
        expected = [sizes.setdefault(axis, size) for axis, size in zip(names, shape, strict=False)]
        if len(shape) != len(names) or shape != expected:
            known = ", ".join(f"{axis} = {sizes[axis]}" for axis in names if axis in sizes)
            raise InputError(f"{name} is {shape}: expected [{', '.join(names)}] with {known}.")
        if name in FLAGS and tensor.dtype != torch.bool:
            raise InputError(
                f"{name} is {tensor.dtype}: expected torch.bool, which {name}.bool() makes of "
                "zeros and ones."
            )


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, converted to float32 if in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any of the tensors is, else float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32
