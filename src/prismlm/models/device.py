"""Device and precision of a model, and the sequences that it accepts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.ops.prototype_head.fast import has_fast_product


def device_named(name: str) -> str:
    """Resolve ``auto`` to cuda if available, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def device_kind(device: torch.device) -> str:
    """Return what a device is: cpu, or the name of its GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


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
    return precision == "bf16" or device == "cuda" or has_fast_product()


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of learned position embeddings, or None with rotary positions."""
    bounds = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and (name.endswith("wpe") or "position" in name.rpartition(".")[2])
    ]
    if not bounds:
        return None
    config: Any = getattr(model, "config", None)
    # OPT's table has two extra rows.
    stated = getattr(config, "max_position_embeddings", None)
    return min(*bounds, stated) if isinstance(stated, int) else min(bounds)


def check_window(model: nn.Module, length: int) -> None:
    """Raise InputError for a window that exceeds the learned position embeddings."""
    bound = learned_positions(model)
    if bound is not None and length > bound:
        raise InputError(
            f"a window of {length:,} tokens, but the model has embeddings of {bound:,} positions: "
            f"choose windows of at most {bound:,} tokens."
        )


def check_sequence(input_ids: Tensor) -> None:
    """Raise InputError unless ``input_ids`` is one sequence [T] of at least one token."""
    if input_ids.ndim != 1 or not input_ids.numel():
        raise InputError(
            f"input_ids are {list(input_ids.shape)}: expected [T], one sequence of at least one "
            "token."
        )
