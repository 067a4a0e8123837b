"""How much each attention head writes into the residual stream, position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from prismlm.errors import InputError
from prismlm.layers.signal_noise_attention import SignalNoiseAttention
from prismlm.models.attention import attention_layers, head_groups
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import run_decoder
from prismlm.models.watch import Hook, watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What Hugging Face's decoders call the matrix that merges heads.
NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo")


def head_writes(
    model: PreTrainedModel, input_ids: Int64[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T H"], ...]:
    """Return ‖W_h Σ_j a_hij v_hj‖ of each layer, float32: what head h adds at position i.

    W_h are the columns of the output matrix that read the head; its bias is no head's, and a norm
    that the family puts after the matrix is not in it. Unlike ‖v_h‖, which ProtoT's appendix
    measures, it says what the head does where it stands, heads that share values differ, and one
    that rests on the first token counts little.

    Raises:
        InputError: the model has no attention, or its heads cannot be separated.
    """
    heads = head_groups(model)[-1].stop
    merging = [
        _merging(layer, number, heads) for number, layer in enumerate(attention_layers(model))
    ]
    found: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, nn.Linear | Conv1D)
        x = (args[0] if args else kwargs["input"]).float().unflatten(-1, (heads, -1))
        weight = module.weight.float()
        columns = (weight if isinstance(module, Conv1D) else weight.T).unflatten(0, (heads, -1))
        gram = columns @ columns.mT
        squares = torch.einsum("bthi,hij,bthj->bth", x, gram, x)
        found[module] = squares.clamp(min=0).sqrt()

    with evaluating(model), watch(Hook(module, before=note) for module in merging):
        run_decoder(model, input_ids, mask)
    return tuple(found[module] for module in merging)


def _merging(layer: nn.Module, number: int, heads: int) -> nn.Module:
    """Return the matrix that merges a layer's heads."""
    if isinstance(layer, SignalNoiseAttention):
        why = "the merged output of signal/noise attention has λ in it and no matrix of its own"
    else:
        found = [getattr(layer, name) for name in NAMES if hasattr(layer, name)]
        if not found:
            why = f"a {type(layer).__name__} has none of {', '.join(NAMES)}"
        elif not isinstance(one := found[0], nn.Linear | Conv1D):
            why = f"its heads are merged by a {type(one).__name__}, not by a plain matrix"
        else:
            width = one.weight.shape[0] if isinstance(one, Conv1D) else one.in_features
            if not width % heads:
                return one
            why = f"{width} columns are merged, and {heads} heads do not divide them"
    raise InputError(f"what each head of layer {number} writes cannot be told apart: {why}.")
