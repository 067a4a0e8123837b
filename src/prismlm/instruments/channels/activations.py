"""Activations of channels or heads, forward pass by forward pass."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError, suggest
from prismlm.models.decoders.mixers import gates_of
from prismlm.models.seam import base_model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

Kind = Literal["write", "read", "values"]
KINDS = ("write", "read", "values")


class BatchActivations(NamedTuple):
    """Activations of one batch, on the CPU, padding left out: N positions.

    Attributes:
        tokens: the token of each position.
        layers: activations of each layer, float32.
    """

    tokens: Int64[Tensor, " N"]
    layers: tuple[Float[Tensor, "N P"], ...]


@torch.no_grad()
def value_norms(
    model: nn.Module, input_ids: Int64[Tensor, "B T"], mask: Tensor | None = None
) -> tuple[Float[Tensor, "B T H"], ...]:
    """Return ‖v_h‖ of each layer's value heads, before attention mixes positions; float32.

    Heads that share keys and values count once. Only this thread's pass counts.

    Source: ProtoT, A.8: "attention heads value norms".

    Raises:
        InputError: the model has no layer with ``self_attn.v_proj``, as LLaMA's have.
    """
    projections = _value_projections(model)
    found: dict[nn.Module, Tensor] = {}
    thread = threading.get_ident()

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if threading.get_ident() == thread:
            heads = output.detach().float().unflatten(-1, (-1, projections[module]))
            found[module] = heads.norm(dim=-1)

    handles = [module.register_forward_hook(note) for module in projections]
    try:
        base_model_of(model)(
            input_ids=input_ids,
            attention_mask=None if mask is None else mask.long(),
            use_cache=False,
        )
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found[module] for module in projections)


def activations(
    model: PreTrainedModel, batch: WindowBatch, kind: Kind = "write"
) -> BatchActivations:
    """Return a batch's write gates, read gates or value norms.

    Raises:
        InputError: an unknown kind, or one that the model does not have.
    """
    ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    if kind == "values":
        layers = value_norms(model, ids, mask)
    elif kind in KINDS:
        layers = tuple(getattr(evidence, kind) for evidence in gates_of(model, ids, mask))
    else:
        raise InputError(
            f"there are no activations {kind!r}: expected {', '.join(KINDS)}."
            f"{suggest(kind, list(KINDS))}"
        )
    owned = batch.owned.to(model.device)
    return BatchActivations(
        batch.input_ids[batch.owned], tuple(a[owned].float().cpu() for a in layers)
    )


def _value_projections(model: nn.Module) -> dict[nn.Module, int]:
    """Return each layer's value projection with the width of a head."""
    found: dict[nn.Module, int] = {}
    for name, module in model.named_modules():
        projection, width = getattr(module, "v_proj", None), getattr(module, "head_dim", None)
        if name.endswith("self_attn") and isinstance(projection, nn.Module) and width:
            found[projection] = int(width)
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no value projections self_attn.v_proj: value norms are "
            "read from models built as LLaMA is."
        )
    return found
