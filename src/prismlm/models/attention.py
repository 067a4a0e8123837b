"""What a model's heads look at and what they write while it runs, layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from prismlm.errors import InputError
from prismlm.layers.signal_noise_attention import SignalNoiseAttention, SignalNoiseOutput
from prismlm.models.decoders.mixers import chosen_layers
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import run_decoder
from prismlm.models.watch import Hook, watch
from prismlm.ops.signal_noise_attention import attention_weights

Group = Literal["signal", "noise", "attention"]
Read = Callable[[int, Tensor], None]

EAGER = "eager"
# What Hugging Face's decoders call the matrix that merges heads.
NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo")
# Of each configuration, by its id, the form that passes of this thread or task take.
_NONE: dict[int, str] = {}
_forms: ContextVar[dict[int, str]] = ContextVar("prismlm_attention_form", default=_NONE)
# Where a configuration keeps its own; some families have a property of their own over it.
FORM = "_attn_implementation_internal"
_counting = threading.Lock()
_open_blocks = 0


class HeadGroup(NamedTuple):
    """Heads of a layer that are of one kind: ``start`` to ``stop`` of its weights' second axis."""

    name: Group
    start: int
    stop: int


def attention_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the attention of each layer, first to last; raise InputError if there is none."""
    own = [module for module in model.modules() if isinstance(module, SignalNoiseAttention)]
    # Hugging Face's decoders name theirs so, and number them for their caches.
    theirs = [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]
    if not own and not theirs:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no attention heads to read: expected signal/noise "
            "attention, or a Hugging Face decoder with attention."
        )
    return tuple(own or theirs)


def head_groups(model: nn.Module) -> tuple[HeadGroup, ...]:
    """Return which heads of a layer are of which kind; every layer has the same."""
    first = attention_layers(model)[0]
    if isinstance(first, SignalNoiseAttention):
        return (
            HeadGroup("signal", 0, first.heads),
            HeadGroup("noise", first.heads, 2 * first.heads),
        )
    config: Any = getattr(first, "config", None) or getattr(model, "config", None)
    return (HeadGroup("attention", 0, int(config.num_attention_heads)),)


@contextmanager
def reading_attention(
    model: PreTrainedModel, read: Read, *, layers: Sequence[int] | None = None
) -> Iterator[None]:
    """Call ``read(layer, weights)`` as each layer runs, with its weights [B, heads, T, S].

    Rows sum to 1, for noise heads too: λ is not in them. A Hugging Face model runs its eager
    attention meanwhile, since the fused forms hold no weights. Unwatched passes are not read.
    The tensor is the model's own, so copy what is to be kept. ``layers`` are from 0; None for all.
    """
    attentions = attention_layers(model)

    def look(layer: int, module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        read(layer, _weights_of(module, kwargs, output, layer))

    hooks = [
        Hook(attentions[layer], after=partial(look, layer))
        for layer in chosen_layers(len(attentions), layers)
    ]
    own = isinstance(attentions[0], SignalNoiseAttention)
    with nullcontext() if own else attention_form(model), watch(hooks):
        yield


@contextmanager
def attention_form(model: PreTrainedModel, name: str = EAGER) -> Iterator[None]:
    """Let this thread's or task's passes run a form of attention, those of others what they did.

    A model asks its configurations at each pass which form to take, for its masks and its layers:
    while blocks are open, they answer by who asks. Another form than ``eager``, as transformers has
    it registered, goes before it however blocks are nested.
    """
    around = _forms.get()
    forms = dict(around)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and forms.get(id(config), EAGER) == EAGER:
            forms[id(config)] = name
    _forms.set(forms)
    _answer_by_asker(+1)
    try:
        yield
    finally:
        _answer_by_asker(-1)
        # Tasks that were begun in the block have a copy of its context, and may outlive it.
        forms.clear()
        if _forms.get() is forms:
            _forms.set(around)


def _answer_by_asker(change: int) -> None:
    """Count the open blocks; while there are any, configurations look up who asks."""
    global _open_blocks
    with _counting:
        if not _open_blocks:
            setattr(PreTrainedConfig, FORM, property(_form_here, _set_form))
        _open_blocks += change
        if not _open_blocks:
            delattr(PreTrainedConfig, FORM)


def _form_here(config: PreTrainedConfig) -> Any:
    """Return the form that passes of this thread or task take, or else the configuration's own."""
    form, own = _forms.get().get(id(config)), vars(config)
    if form is None and FORM not in own:
        raise AttributeError(f"{type(config).__name__} has no {FORM}")
    return form or own[FORM]


def _set_form(config: PreTrainedConfig, form: Any) -> None:
    vars(config)[FORM] = form


def _weights_of(module: nn.Module, kwargs: dict[str, Any], output: Any, layer: int) -> Tensor:
    """Return the weights of a call of a layer's attention."""
    if not isinstance(module, SignalNoiseAttention):
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor):
            raise InputError(
                f"the attention of layer {layer}, a {type(module).__name__}, gives no weights "
                "even in its eager form: its heads cannot be read."
            )
        return weights
    past, own = kwargs.get("past"), cast("SignalNoiseOutput", output).projections
    seen = own if past is None else torch.cat([past, own], 2)
    return attention_weights(
        seen[:, : module.heads],
        seen[:, module.heads :],
        signal_frequencies=module.signal_frequencies,
        noise_frequencies=module.noise_frequencies,
        positions=kwargs.get("positions"),
        mask=kwargs.get("mask"),
        queries=own.shape[2],
        scale=module.scale,
    )


def head_writes(
    model: PreTrainedModel, input_ids: Int64[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T H"], ...]:
    """Return ‖W_h Σ_j a_hij v_hj‖ of each layer, float32: what head h adds at position i.

    W_h are the columns of the output matrix that read the head; its bias is no head's, and a norm
    that the family puts after the matrix is not in it. Unlike ‖v_h‖, which ProtoT's appendix
    measures, it says what the head does where it stands, heads that share values differ, and one
    that rests on the first token counts little.
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
        matrix = next((getattr(layer, name) for name in NAMES if hasattr(layer, name)), None)
        if isinstance(matrix, nn.Linear | Conv1D):
            width = matrix.weight.shape[0 if isinstance(matrix, Conv1D) else 1]
            if not width % heads:
                return matrix
        why = f"a {type(layer).__name__} has no plain matrix {', '.join(NAMES)} over its heads"
    raise InputError(f"what each head of layer {number} writes cannot be told apart: {why}.")
