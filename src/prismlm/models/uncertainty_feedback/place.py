"""Where in a model uncertainty feedback stands: its decoder, and the embeddings of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from prismlm.errors import InputError, check_text
from prismlm.models.seam import sees_ahead

LISTED = 8


def check_model(model: object) -> None:
    """Raise InputError for what is no Hugging Face model, saying what to give instead."""
    if isinstance(model, PreTrainedModel):
        return
    said = f"expected a Hugging Face model (PreTrainedModel), got a {type(model).__name__}"
    if isinstance(getattr(model, "module", None), PreTrainedModel):
        raise InputError(f"{said} around one: attach to its .module, before it is wrapped.")
    if isinstance(getattr(model, "model", None), PreTrainedModel):
        raise InputError(f"{said}: give its .model.")
    if isinstance(model, str):
        raise InputError(f"{said}, {model!r}: load it, AutoModelForCausalLM.from_pretrained(…).")
    raise InputError(f"{said}.")


def decoder_and_embeddings(
    model: PreTrainedModel, *, decoder: str | None = None, embeddings: str | None = None
) -> tuple[nn.Module, nn.Module]:
    """Return a language model's decoder and the embeddings of its input.

    Args:
        model: a language model.
        decoder: the decoder's name in ``model.named_modules()``; None asks ``get_decoder()``.
        embeddings: the input embeddings' name; None asks ``get_input_embeddings()``, of an
            encoder-decoder that of the decoder: T5's two halves have modules of their own over
            one tied weight.

    Raises:
        InputError: it predicts no next token, one of the two is not found, or the embeddings have
            no weight [V, d].
    """
    kind = f"a {type(model).__name__} of type {model.config.model_type!r}"
    if not model.can_generate():
        raise InputError(
            f"{kind} predicts no next token, so there is no prediction whose uncertainty could be "
            "fed back: expected a causal language model or an encoder-decoder."
        )
    inner = _module_of(model, model, decoder, "get_decoder")
    embeds = inner if model.config.is_encoder_decoder and inner is not None else model
    inputs = _module_of(model, embeds, embeddings, "get_input_embeddings")
    looked_at = {
        "decoder": decoder or "get_decoder()",
        "embeddings": embeddings or "get_input_embeddings()",
    }
    if inner is None or inputs is None:
        found = {"decoder": inner, "embeddings": inputs}
        missing = [part for part, module in found.items() if module is None]
        looked = " and ".join(f"{looked_at[part]} for its {part}" for part in missing)
        names = ", ".join(f'{part}="…"' for part in missing)
        raise InputError(
            f"no {' and no '.join(missing)} found in {kind}: looked at {looked}. Name what it is: "
            f"attach_uncertainty(model, {names}), dotted as in model.named_modules(). "
            f"{_candidates(model, *missing)}"
        )
    if decoder is not None and not any(isinstance(m, nn.Embedding) for m in inner.modules()):
        raise InputError(
            f"{decoder} of {kind} has no embeddings inside and is no decoder, which calls them: "
            f"{_candidates(model, 'decoder')}"
        )
    weight = getattr(inputs, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        raise InputError(
            f"{looked_at['embeddings']} of {kind} is a {type(inputs).__name__} without a weight "
            f'[V, d]. Name the module that has it: embeddings="…". '
            f"{_candidates(model, 'embeddings')}"
        )
    return inner, inputs


def _module_of(
    model: nn.Module, asked: nn.Module, name: str | None, getter: str
) -> nn.Module | None:
    if name is not None:
        found = dict(model.named_modules()).get(check_text("the name of a module", name))
    else:
        try:
            found = getattr(asked, getter)()
        except (AttributeError, NotImplementedError):
            found = None
    # A decoder that is the whole model would have its hooks called before the model's own.
    return found if isinstance(found, nn.Module) and found is not model else None


def _candidates(model: nn.Module, *missing: str) -> str:
    """Return which modules may be meant, eight of each kind at most."""
    kinds = {
        "decoder": (
            "Modules that have parts",
            [n for n, m in model.named_children() if [*m.children()]],
        ),
        "embeddings": (
            "Its nn.Embedding modules",
            [name for name, m in model.named_modules() if isinstance(m, nn.Embedding)],
        ),
    }
    said = list[str]()
    for title, names in map(kinds.__getitem__, missing):
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        said.append(f"{title}: {', '.join(names[:LISTED]) or 'none'}{more}.")
    return " ".join(said)


def width_of(inputs: nn.Module) -> int:
    """Return d of input embeddings."""
    weight: Any = inputs.weight
    return int(weight.shape[1])


def check_causal(model: PreTrainedModel) -> None:
    """Raise InputError for a model whose predictions look at the tokens that they predict."""
    if sees_ahead(model):
        raise InputError(
            f"a {type(model).__name__} of type {model.config.model_type!r} is an encoder: its "
            "prediction at a position changes with the token after it, so it has no next-token "
            "prediction whose uncertainty could be fed back. Load it with is_decoder=True, if it "
            "was trained so, or use a causal language model."
        )
