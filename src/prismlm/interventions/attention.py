"""Clamping the attention of one text onto another, in any Hugging Face decoder with heads.

The counterpart of ``ClampGates`` for attention: while a clamp holds, position i of a pass looks
where position a(i) of the recorded text looked; values stay its own text's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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
from prismlm.models.watch import evaluating

CLAMPED = "prismlm_clamped"
EAGER_FUNCTION = "eager_attention_forward"


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """The attention weights of one text, in every layer.

    Attributes:
        input_ids: of the text, int64 [T].
        layers: the weights of each layer, [H, T, T].
    """

    input_ids: Int64[Tensor, " T"]
    layers: tuple[Tensor, ...]


# Of each layer the recorded weights, and a(i) of each position.
Held = dict[nn.Module, tuple[Tensor, Tensor]]
_NONE: Held = {}
_held: ContextVar[Held] = ContextVar("prismlm_attention", default=_NONE)


def record_attention(model: PreTrainedModel, input_ids: Int64[Tensor, " T"]) -> AttentionRecord:
    """Return the attention weights of one sequence, for :func:`clamp_attention`."""
    check_sequence(input_ids)
    layers = _clampable_layers(model)
    found: dict[int, Tensor] = {}

    def read(layer: int, weights: Tensor) -> None:
        found[layer] = weights[0].clone()

    with evaluating(model), reading_attention(model, read):
        model(input_ids=input_ids[None].to(model.device), use_cache=False)
    return AttentionRecord(input_ids, tuple(found[layer] for layer in range(len(layers))))


@contextmanager
def clamp_attention(
    model: PreTrainedModel, record: AttentionRecord, alignment: Sequence[int] | None = None
) -> Iterator[None]:
    """Give this thread's or task's passes the attention weights that another text had.

    Each pass in the block reads one text whole, without a cache, in a batch of rows that are
    clamped alike. How weights are mapped, :func:`mapped_weights` says.

    Args:
        model: the one that the record is of.
        record: what :func:`record_attention` gave.
        alignment: a(i) for each position, −1 for its own weights, otherwise ascending; None for
            a(i) = i in a text of equal length.
    """
    length = len(record.input_ids)
    sources = torch.arange(length) if alignment is None else torch.as_tensor(alignment)
    known = sources[sources >= 0]
    if bool((known.diff() <= 0).any()) or (known.numel() and int(known[-1]) >= length):
        raise InputError(
            f"an alignment to {known.tolist()}: expected ascending positions of the recorded text, "
            f"0 to {length - 1}, and −1 for a position's own weights."
        )
    layers = _clampable_layers(model)
    if len(layers) != len(record.layers):
        raise InputError(
            f"the model has {len(layers)} layers with attention and the record "
            f"{len(record.layers)}: record it with the model that it is clamped onto."
        )
    pairs = [(weights, sources.to(weights.device)) for weights in record.layers]
    token = _held.set(dict(zip(layers, pairs, strict=True)))
    try:
        with attention_form(model, CLAMPED):
            yield
    finally:
        _held.reset(token)


def mapped_weights(
    own: Float[Tensor, "*B T T"], recorded: Float[Tensor, "*H S S"], sources: Int64[Tensor, " T"]
) -> Float[Tensor, "*B T T"]:
    """Return attention weights w′ of a text whose positions have counterparts a in another.

        w′_ij = (Σ_{j′: a(j′) ≥ 0} w_ij′) · r_{a(i) a(j)} / Σ_{j′: a(j′) ≥ 0} r_{a(i) a(j′)}

    where both i and j have a counterpart; w′_ij = w_ij elsewhere. So positions without one are
    looked at as much as before, and the rest is spread as in the recorded text. A row of r with
    nothing on counterparts leaves w's.

    Args:
        own: w, whose rows sum to 1.
        recorded: r.
        sources: a, −1 for none.
    """
    there = sources >= 0
    places = sources.clamp(min=0)
    taken = recorded.to(own)[..., places, :][..., places] * there
    whole = taken.sum(-1, keepdim=True)
    share = (own * there).sum(-1, keepdim=True) / whole
    clamped = torch.where(there, share * taken, own)
    return torch.where(there[:, None] & (whole > 0), clamped, own)


def _clampable_layers(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    layers = attention_layers(model)
    for layer in layers:
        if isinstance(layer, SignalNoiseAttention) or _eager_function(layer) is None:
            raise InputError(
                f"the attention of {type(model).__name__} ({type(layer).__name__}) cannot be "
                "clamped: expected a Hugging Face decoder whose attention functions can be "
                "replaced, such as a Llama or GPT-2."
            )
    return layers


def _eager_function(layer: nn.Module) -> Any:
    return getattr(sys.modules[type(layer).__module__], EAGER_FUNCTION, None)


def _clamped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return what the family's own eager attention gives, with the weights that are held."""
    output, own = _eager_function(module)(module, query, key, value, mask, **kwargs)
    if module not in _held.get():
        return output, own
    recorded, sources = _held.get()[module]
    if own.shape[-2:] != (len(sources),) * 2:
        raise InputError(
            f"a pass reads {own.shape[-2]} positions and sees {own.shape[-1]}, and the clamp has "
            f"{len(sources)}: read one whole text of so many tokens, without a cache."
        )
    weights = mapped_weights(own, recorded, sources)
    # Heads may share keys and values.
    values = value.repeat_interleave(own.shape[1] // value.shape[1], 1)
    return (weights @ values).transpose(1, 2).contiguous(), weights


ALL_ATTENTION_FUNCTIONS.register(CLAMPED, _clamped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(CLAMPED, eager_mask)
