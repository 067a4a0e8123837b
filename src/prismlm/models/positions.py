"""Which sequences a model can read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prismlm.errors import InputError


def learned_positions(model: nn.Module) -> int | None:
    """Return how many positions a model has learned an embedding of, or None if it rotates them."""
    bounds = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and (name.endswith("wpe") or "position" in name.rpartition(".")[2])
    ]
    if not bounds:
        return None
    config: Any = getattr(model, "config", None)
    # OPT's table has two rows more than it has positions.
    stated = getattr(config, "max_position_embeddings", None)
    return min(*bounds, stated) if isinstance(stated, int) else min(bounds)


def check_window(model: nn.Module, length: int) -> None:
    """Raise InputError for a window that is longer than the positions that a model has learned."""
    bound = learned_positions(model)
    if bound is not None and length > bound:
        raise InputError(
            f"a window of {length:,} tokens, but the model has learned an embedding of {bound:,} "
            f"positions: take windows of at most {bound:,} tokens."
        )


def check_sequence(input_ids: Tensor) -> None:
    """Raise InputError for anything but the tokens [T] of one sequence, at least one."""
    if input_ids.ndim != 1 or not input_ids.numel():
        raise InputError(
            f"input_ids are {list(input_ids.shape)}: expected [T], one sequence of at least one "
            "token."
        )
