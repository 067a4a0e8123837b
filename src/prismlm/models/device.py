"""Device and precision of a model."""

from __future__ import annotations

import torch

from prismlm.errors import InputError


def device_named(name: str) -> str:
    """Resolve ``auto`` to cuda if available, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def uses_bf16(precision: str, device: str) -> bool:
    """Return whether to run under bf16 autocast; ``auto`` does if the hardware supports it."""
    if precision == "float32":
        return False
    device = device.partition(":")[0]
    if device == "cuda" and torch.cuda.is_available():
        capable = torch.cuda.is_bf16_supported(including_emulation=False)
        if precision == "bf16" and not capable:
            raise InputError("precision is bf16, which this GPU lacks. Use float32 or auto.")
        return capable
    if precision == "bf16" or device == "cuda":
        return True
    # Private functions of torch; without them float32 is safe.
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)
