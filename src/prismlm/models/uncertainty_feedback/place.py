"""Where in a model uncertainty feedback stands: its decoder, and the embeddings of its input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.models.seam import sees_ahead

MODULES_NAMED = 8


def check_model(model: object) -> None:
    """Raise InputError for what predicts no next token, as wrappers, encoders and names."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"expected a Hugging Face model (PreTrainedModel), got a {type(model).__name__}: load "
            "it first, and of a wrapped model give the one inside, its .module or .model."
        )
    if not model.can_generate() or sees_ahead(model):
        raise InputError(
            f"{_kind(model)} predicts no next token, so there is no prediction whose uncertainty "
            "could be fed back: expected a causal language model or an encoder-decoder. A model "
            "that was trained as a decoder may have to be loaded with is_decoder=True."
        )


def decoder_and_embeddings(
    model: PreTrainedModel, *, decoder: str | None = None, embeddings: str | None = None
) -> tuple[nn.Module, nn.Module]:
    """Return a language model's decoder and the embeddings of its input, which hold [V, d].

    Args:
        model: a language model.
        decoder: the decoder's name in ``model.named_modules()``; None asks ``get_decoder()``.
        embeddings: the input embeddings' name; None asks ``get_input_embeddings()``, of an
            encoder-decoder that of the decoder: T5's two halves have modules of their own over
            one tied weight.
    """
    inner = _module(model, model, decoder, "get_decoder")
    # One that is the whole model would have its hooks called before the model's own.
    if inner is None or inner is model or (decoder is not None and not _has_embeddings(inner)):
        parts = [name for name, module in model.named_children() if [*module.children()]]
        raise _not_found(model, "decoder", decoder, parts)
    asked = inner if model.config.is_encoder_decoder else model
    inputs = _module(model, asked, embeddings, "get_input_embeddings")
    weight = getattr(inputs, "weight", None)
    if inputs is None or not isinstance(weight, Tensor) or weight.ndim != 2:
        tables = [name for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
        raise _not_found(model, "embeddings", embeddings, tables)
    return inner, inputs


def width_of(inputs: nn.Module) -> int:
    """Return d of input embeddings."""
    weight: Any = inputs.weight
    return int(weight.shape[1])


def _module(model: nn.Module, asked: nn.Module, name: str | None, getter: str) -> nn.Module | None:
    if name is not None:
        return dict(model.named_modules()).get(name)
    try:
        found: Any = getattr(asked, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def _has_embeddings(module: nn.Module) -> bool:
    return any(isinstance(inside, nn.Embedding) for inside in module.modules())


def _kind(model: PreTrainedModel) -> str:
    return f"a {type(model).__name__} of type {model.config.model_type!r}"


def _not_found(
    model: PreTrainedModel, part: str, given: str | None, candidates: list[str]
) -> InputError:
    asked = "the model does not say which it is" if given is None else f"{given!r} is none"
    return InputError(
        f"no {part} found in {_kind(model)}: {asked}. Name the module, "
        f'attach_uncertainty(model, {part}="…"), dotted as in model.named_modules(). It may be '
        f"one of: {', '.join(candidates[:MODULES_NAMED]) or 'none was found'}."
    )
