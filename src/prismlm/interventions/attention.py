"""Clamping the attention of one text onto another, in any Hugging Face decoder with heads.

The counterpart of ``ClampGates`` for attention: in a clamped pass position i attends where
position a(i) of the recorded text attended; values stay the text's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prismlm.errors import InputError
from prismlm.layers.signal_noise_attention import SignalNoiseAttention
from prismlm.models.attention import attention_form, attention_layers, reading_attention
from prismlm.models.device import check_sequence
from prismlm.models.watch import evaluating, within

CLAMPED = "prismlm_clamped"
# The attention weights of one text, [H, T, T] for each layer.
AttentionRecord = tuple[Tensor, ...]
# For each layer the recorded weights, and a(i) of each position.
Clamps = dict[nn.Module, tuple[Tensor, Tensor]]
_NONE: Clamps = {}
_clamps: ContextVar[Clamps] = ContextVar("prismlm_attention", default=_NONE)


def record_attention(model: PreTrainedModel, input_ids: Int64[Tensor, " T"]) -> AttentionRecord:
    """Return the attention weights of one sequence, for :func:`clamp_attention`."""
    check_sequence(input_ids)
    layers = _clampable_layers(model)
    recorded: dict[int, Tensor] = {}

    def record(layer: int, weights: Tensor) -> None:
        recorded[layer] = weights[0].clone()

    with evaluating(model), reading_attention(model, record):
        model(input_ids=input_ids[None].to(model.device), use_cache=False)
    return tuple(recorded[layer] for layer in range(len(layers)))


@contextmanager
def clamp_attention(
    model: PreTrainedModel, record: AttentionRecord, alignment: Sequence[int] | None = None
) -> Iterator[None]:
    """Replace the attention weights of passes in this block and context by recorded ones.

    Each pass reads a full text without a cache; all rows of a batch are clamped alike, by
    :func:`mapped_weights`. ``alignment`` has a(i) for each position, ascending, −1 for its own
    weights; None for a(i) = i in a text of equal length.
    """
    length = record[0].shape[-1]
    sources = torch.arange(length) if alignment is None else torch.as_tensor(alignment)
    if bool((sources[sources >= 0].diff() <= 0).any()):
        # Otherwise positions would see later ones.
        raise InputError(f"an alignment to {sources.tolist()}: expected ascending positions.")
    layers = _clampable_layers(model)
    pairs = [(weights, sources.to(weights.device)) for weights in record]
    clamps = dict(zip(layers, pairs, strict=True))
    with within(_clamps, clamps), attention_form(model, CLAMPED):
        yield


def mapped_weights(
    weights: Float[Tensor, "*B T T"],
    recorded: Float[Tensor, "*H S S"],
    sources: Int64[Tensor, " T"],
) -> Float[Tensor, "*B T T"]:
    """Return attention weights w′ of a text whose positions have counterparts a in another.

        w′_ij = (Σ_{j′: a(j′) ≥ 0} w_ij′) · r_{a(i) a(j)} / Σ_{j′: a(j′) ≥ 0} r_{a(i) a(j′)}

    where both i and j have a counterpart; w′_ij = w_ij elsewhere. So positions without one keep
    their weight, and the rest is spread as in the recorded text. Rows of r that are zero on all
    counterparts leave w unchanged. ``recorded`` is r, and ``sources`` a, −1 for none.
    """
    aligned = sources >= 0
    indices = sources.clamp(min=0)
    target = recorded.to(weights)[..., indices, :][..., indices] * aligned
    total = target.sum(-1, keepdim=True)
    share = (weights * aligned).sum(-1, keepdim=True) / total
    clamped = torch.where(aligned, share * target, weights)
    return torch.where(aligned[:, None] & (total > 0), clamped, weights)


def _clampable_layers(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    layers = attention_layers(model)
    for layer in layers:
        if isinstance(layer, SignalNoiseAttention) or _eager_function(layer) is None:
            raise InputError(
                f"the attention of {type(model).__name__} cannot be clamped: expected a Hugging "
                "Face decoder whose attention functions can be replaced, such as a Llama."
            )
    return layers


def _eager_function(layer: nn.Module) -> Any:
    return getattr(sys.modules[type(layer).__module__], "eager_attention_forward", None)


def _clamped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Run the family's own eager attention, with clamped weights."""
    output, weights = _eager_function(module)(module, query, key, value, mask, **kwargs)
    if module not in _clamps.get():
        return output, weights
    recorded, sources = _clamps.get()[module]
    queries, keys = weights.shape[-2:]
    if not queries == keys == len(sources):
        raise InputError(
            f"a pass reads {queries} positions and sees {keys}, and the clamp has {len(sources)}: "
            "read one complete text of that length, without a cache."
        )
    clamped = mapped_weights(weights, recorded, sources)
    # Grouped-query attention: several heads share keys and values.
    values = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    return (clamped @ values).transpose(1, 2).contiguous(), clamped


ALL_ATTENTION_FUNCTIONS.register(CLAMPED, _clamped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(CLAMPED, eager_mask)
