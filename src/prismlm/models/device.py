"""Device and precision of a model, and the sequences that it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.ops.prototype_head.fast import has_fast_product

# Spread a model evenly over all GPUs, then over CPU memory, then leave the rest on disk.
BALANCED = "balanced"
# A device, or where each module is: accelerate's ``device_map``.
Placement: TypeAlias = str | Mapping[str, str | int]


def device_named(name: str) -> str:
    """Resolve ``auto`` to cuda if available, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def hold_embeddings(model: Any) -> None:
    """Put the embeddings of a model that is spread over devices on one of them, for good.

    States that enter the output embedding are moved there before any hook sees them. So whatever
    reads W, z or ``model.device`` need not know where the layers are.
    """
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import align_module_device

    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied, device = model.config.tie_word_embeddings, inputs._hf_hook.execution_device

    def moved(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg.to(device) for arg in args)

    for module in (inputs, outputs):
        with align_module_device(module):
            held = {
                name: nn.Parameter(weight.detach().to(device, copy=True), requires_grad=False)
                for name, weight in module.named_parameters(recurse=False)
            }
        remove_hook_from_module(module)
        for name, weight in held.items():
            setattr(module, name, weight)
        module.register_forward_pre_hook(moved)
    if tied:
        outputs.weight = inputs.weight


def device_kind(device: torch.device) -> str:
    """Return what a device is: cpu, or the name of its GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def uses_bf16(precision: str, device: str) -> bool:
    """Return whether to run under bf16 autocast; ``auto`` does if the hardware supports it."""
    if precision != "auto":
        return precision == "bf16"
    device = device_named("auto" if device == BALANCED else device).partition(":")[0]
    if device == "cuda":
        gpus = torch.cuda
        return not gpus.is_available() or gpus.is_bf16_supported(including_emulation=False)
    return has_fast_product()


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
