"""Where a model runs, and in which precision."""

from __future__ import annotations

import torch

from prismlm.errors import InputError


def device_named(name: str) -> str:
    """Return where a model runs: on a GPU if that is left open (auto) and there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def uses_bf16(precision: str, device: str) -> bool:
    """Say whether forward passes run under bf16 autocast; ``auto`` asks what the machine has."""
    if precision == "float32":
        return False
    device = device.partition(":")[0]
    if device == "cuda" and torch.cuda.is_available():
        capable = torch.cuda.is_bf16_supported(including_emulation=False)
        if precision == "bf16" and not capable:
            raise InputError("precision is bf16, and this GPU has no bf16. Use float32 or auto.")
        return capable
    if precision == "bf16" or device == "cuda":
        return True
    # Asking torch needs its private functions; without them float32 is the safe answer.
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in asks)
