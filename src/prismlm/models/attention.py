"""Attention weights and head outputs of a model while it runs, layer by layer.

Weights exist in the eager implementation only, which :func:`attention_form` runs for one thread;
other threads that use the model keep theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from prismlm.errors import InputError
from prismlm.layers.signal_noise_attention import SignalNoiseAttention
from prismlm.models.decoders.protot import chosen_layers
from prismlm.models.seam import lacks, run_decoder
from prismlm.models.watch import Hook, evaluating, watch

Group = Literal["signal", "noise", "attention"]
Read = Callable[[int, Tensor], None]

EAGER = "eager"
# Names of the output projection in Hugging Face's decoders.
NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo")
# The implementation for the passes of this thread or task, by the id of a configuration.
_NONE: dict[int, str] = {}
_forms: ContextVar[dict[int, str]] = ContextVar("prismlm_attention_form", default=_NONE)
# Where a configuration stores its implementation; some families have a property over it.
FORM = "_attn_implementation_internal"
_counting = threading.Lock()
_open_blocks = 0


class HeadGroup(NamedTuple):
    """Heads of the same kind in a layer: ``start`` to ``stop`` of the weights' second axis."""

    name: Group
    start: int
    stop: int


def attention_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the attention module of each layer; raise InputError if there is none."""
    layers = [module for module in model.modules() if isinstance(module, SignalNoiseAttention)]
    # The names in Hugging Face's decoders, with the index of their cache.
    layers = layers or [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]
    if not layers:
        raise lacks(model, "attention heads")
    return tuple(layers)


def head_groups(model: nn.Module) -> tuple[HeadGroup, ...]:
    """Return the groups of heads, which are the same in every layer."""
    first = attention_layers(model)[0]
    if isinstance(first, SignalNoiseAttention):
        heads = first.heads
        return HeadGroup("signal", 0, heads), HeadGroup("noise", heads, 2 * heads)
    config: Any = getattr(first, "config", None) or getattr(model, "config", None)
    return (HeadGroup("attention", 0, int(config.num_attention_heads)),)


@contextmanager
def reading_attention(
    model: PreTrainedModel, read: Read, *, layers: Sequence[int] | None = None
) -> Iterator[None]:
    """Call ``read(layer, weights)`` as each layer runs, with its weights [B, heads, T, S].

    Rows sum to 1, also for noise heads: λ is not included. Hugging Face models run eager attention
    in the block, since fused kernels return no weights. Clone the tensors to keep them.
    ``layers`` count from 0; None for all.
    """
    attentions = attention_layers(model)

    def after(layer: int, module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        read(layer, _weights_of(module, kwargs, output, layer))

    hooks = [
        Hook(attentions[layer], after=partial(after, layer))
        for layer in chosen_layers(len(attentions), layers)
    ]
    is_eager = isinstance(attentions[0], SignalNoiseAttention)
    with nullcontext() if is_eager else attention_form(model), watch(hooks):
        yield


@contextmanager
def attention_form(model: PreTrainedModel, name: str = EAGER) -> Iterator[None]:
    """Run an attention implementation in the passes of this thread or task only.

    A model looks up the implementation in its configurations at each pass, for masks and layers:
    in a block, they answer by thread or task. In nested blocks any registered implementation takes
    precedence over ``eager``.
    """
    outer = _forms.get()
    forms = dict(outer)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and forms.get(id(config), EAGER) == EAGER:
            forms[id(config)] = name
    _forms.set(forms)
    _count_blocks(+1)
    try:
        yield
    finally:
        _count_blocks(-1)
        # Tasks that started in the block have a copy of its context, and may outlive it.
        forms.clear()
        if _forms.get() is forms:
            _forms.set(outer)


def _count_blocks(change: int) -> None:
    """Have configurations answer by context in blocks only: torch.compile cannot trace that."""
    global _open_blocks
    with _counting:
        if not _open_blocks:
            setattr(PreTrainedConfig, FORM, property(_get_form, _set_form))
        _open_blocks += change
        if not _open_blocks:
            delattr(PreTrainedConfig, FORM)


def _get_form(config: PreTrainedConfig) -> Any:
    form, values = _forms.get().get(id(config)), vars(config)
    if form is None and FORM not in values:
        raise AttributeError(f"{type(config).__name__} has no {FORM}")
    return form or values[FORM]


def _set_form(config: PreTrainedConfig, form: Any) -> None:
    vars(config)[FORM] = form


def _weights_of(module: nn.Module, kwargs: dict[str, Any], output: Any, layer: int) -> Tensor:
    if isinstance(module, SignalNoiseAttention):
        given = (kwargs.get(name) for name in ("past", "positions", "mask"))
        return module.weights(output.projections, *given)
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(weights, Tensor):
        raise InputError(
            f"the attention of layer {layer}, a {type(module).__name__}, returns no weights "
            "even in its eager implementation: its heads cannot be read."
        )
    return weights


def head_writes(
    model: PreTrainedModel, input_ids: Int64[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T H"], ...]:
    """Return ‖W_h Σ_j a_hij v_hj‖ of each layer, float32: what head h adds at position i.

    W_h are the columns of the output projection that belong to the head; its bias, and a norm
    after it, are excluded. Unlike ‖v_h‖, which ProtoT's appendix measures, it differs between heads
    that share values, and is small for attention sinks.
    """
    heads = head_groups(model)[-1].stop
    layers = enumerate(attention_layers(model))
    projections = [_output_projection(layer, number, heads) for number, layer in layers]
    norms: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, nn.Linear | Conv1D)
        x = (args[0] if args else kwargs["input"]).float().unflatten(-1, (heads, -1))
        weight = module.weight.float()
        columns = (weight if isinstance(module, Conv1D) else weight.T).unflatten(0, (heads, -1))
        gram = columns @ columns.mT
        squares = torch.einsum("bthi,hij,bthj->bth", x, gram, x)
        norms[module] = squares.clamp(min=0).sqrt()

    with evaluating(model), watch(Hook(module, before=before) for module in projections):
        run_decoder(model, input_ids, mask)
    return tuple(norms[module] for module in projections)


def _output_projection(layer: nn.Module, number: int, heads: int) -> nn.Module:
    # The output of signal/noise attention includes λ, and has no matrix per head.
    matrix = next((getattr(layer, name) for name in NAMES if hasattr(layer, name)), None)
    if isinstance(matrix, nn.Linear | Conv1D):
        width = matrix.weight.shape[0 if isinstance(matrix, Conv1D) else 1]
        if not width % heads:
            return matrix
    raise InputError(
        f"the outputs of the heads of layer {number} cannot be separated: a {type(layer).__name__} "
        f"has no plain matrix {', '.join(NAMES)} over its heads."
    )
