"""Minimum precision of computations on half-precision tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, converted to float32 if in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any of the tensors is, else float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32
