"""The seam: where a Hugging Face decoder's last hidden state enters its output embedding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.errors import FormatError, InputError, check_kind
from prismlm.models.evaluating import evaluating
from prismlm.models.watch import Hook, watch

PROBE_SHAPE = (2, 8)
READABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MODULES_NAMED = 8
CACHES = ("past_key_values", "cache_params")
"""What holds positions that a model has seen, as an argument and in the output."""


@dataclass(frozen=True)
class LogitMap:
    """What a model does after W: logits = softcap · tanh(l / softcap), l = scale · (W z + b).

    Attributes:
        scale: the factor of Cohere (``logit_scale``) and Granite (1 / ``logits_scaling``).
        bias: whether the output embedding adds a bias b.
        softcap: the cap of Gemma (``final_logit_softcapping``), or None.
    """

    scale: float = 1.0
    bias: bool = False
    softcap: float | None = None

    @classmethod
    def of(cls, model: nn.Module) -> LogitMap:
        """Read the map from a model's configuration; :func:`verify_logit_map` tests it."""
        config = getattr(model, "config", None)
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        has_bias = getattr(output_embedding(model), "bias", None) is not None
        return cls(scale, has_bias, None if softcap is None else float(softcap))

    def before_softcap(self, embedded: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Apply what follows the output embedding, up to the soft-cap; its argument is W z + b."""
        return embedded if self.scale == 1.0 else embedded * self.scale

    def __call__(self, embedded: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the logits that softmax sees."""
        logits = self.before_softcap(embedded)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass
class Captured:
    """What one forward pass sent through the output embedding.

    Attributes:
        z: its input, [B, T, d].
        embedded: its output W z + b, [B, T, V], or None if the logits were left out.
    """

    z: Tensor = field(default_factory=lambda: torch.empty(0))
    embedded: Tensor | None = None


def output_embedding(model: nn.Module) -> nn.Module:
    """Return the module that holds W.

    Raises:
        InputError: the model has no output embedding, so it predicts no tokens, or its weight is
            quantised, so that it is not W.
    """
    getter = getattr(model, "get_output_embeddings", None)
    embedding = getter() if getter is not None else None
    weight = getattr(embedding, "weight", None)
    kind = type(model).__name__
    if embedding is None or weight is None:
        rows = getattr(getattr(model, "config", None), "vocab_size", None)
        similar = [
            f"{name} ({type(module).__name__})"
            for name, module in model.named_modules()
            if getattr(getattr(module, "weight", None), "shape", (None,))[:1] == (rows,)
        ]
        raise InputError(
            f"{kind} has no output embedding: get_output_embeddings() gives no module with a "
            f"weight. Modules with one row for each of {rows} tokens: "
            f"{', '.join(similar[:MODULES_NAMED]) or 'none'}. Load it with a language modelling "
            "head, or let get_output_embeddings() return the right one."
        )
    # A sharded weight is read whole where it is used; other wrappers hold something in place of W.
    wrapped = hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "full_tensor")
    if wrapped or weight.dtype not in READABLE:
        name = next((name for name, module in model.named_modules() if module is embedding), "")
        raise InputError(
            f"the output embedding {name} of {kind} is quantised (its weight is "
            f"{type(weight).__name__} of {str(weight.dtype).removeprefix('torch.')}), and logits "
            "are split by the weight itself. Leave it out of the quantisation, for example with "
            f"modules_to_not_convert=[{name!r}], or use the model as it was before."
        )
    return embedding


def decoder_and_embeddings(
    model: PreTrainedModel, *, decoder: str | None = None, embeddings: str | None = None
) -> tuple[nn.Module, Any]:
    """Return a language model's decoder and the embeddings of its input, which hold [V, d].

    Args:
        model: a language model.
        decoder: the decoder's name in ``model.named_modules()``; None asks ``get_decoder()``.
        embeddings: the input embeddings' name; None asks ``get_input_embeddings()``, of an
            encoder-decoder that of the decoder: T5's two halves have modules of their own over
            one tied weight.
    """
    for what, name in (("the decoder", decoder), ("the embeddings", embeddings)):
        check_kind(what, name, (str, type(None)), "a module's name")
    modules = dict(model.named_modules())
    tables = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
    inner = _asked(model, "get_decoder") if decoder is None else modules.get(decoder)
    inside = () if inner is None else inner.modules()
    holds_embeddings = decoder is None or any(isinstance(one, nn.Embedding) for one in inside)
    # One that is the whole model would have its hooks called before the model's own.
    if inner is None or inner is model or not holds_embeddings:
        parts = [name for name, module in model.named_children() if [*module.children()]]
        raise _not_found(model, "decoder", decoder, parts)
    owner = inner if model.config.is_encoder_decoder else model
    asked = embeddings is None
    inputs = _asked(owner, "get_input_embeddings") if asked else modules.get(embeddings)
    weight = getattr(inputs, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise _not_found(model, "embeddings", embeddings, tables)
    return inner, inputs


def _asked(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        found: Any = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def _not_found(
    model: PreTrainedModel, part: str, given: str | None, candidates: list[str]
) -> InputError:
    asked = "the model does not say which it is" if given is None else f"{given!r} is none"
    return InputError(
        f"no {part} found in a {type(model).__name__} of type {model.config.model_type!r}: "
        f'{asked}. Name the module, attach_uncertainty(model, {part}="…"), dotted as in '
        "model.named_modules(). It may be one of: "
        f"{', '.join(candidates[:MODULES_NAMED]) or 'none was found'}."
    )


@contextmanager
def capture(model: nn.Module, *, logits: bool = True) -> Iterator[Captured]:
    """Watch the output embedding during the block.

    With ``logits=False`` the output embedding is handed no positions, in every family alike: the
    states are seen and the vocabulary product is never formed. Only this thread's passes count:
    others may use the model meanwhile.
    """
    captured = Captured()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        captured.z = args[0]
        return None if logits else ((args[0][..., :0, :], *args[1:]), kwargs)

    def after(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        captured.embedded = output

    with watch([Hook(output_embedding(model), before, after if logits else None)]):
        yield captured


@torch.no_grad()
def verify_logit_map(model: nn.Module, logit_map: LogitMap) -> float:
    """Check W, b and the map on a probe batch; return the largest error over max(1, |logit|).

    Raises:
        FormatError: they do not reproduce the model's logits.
    """
    embedding = output_embedding(model)
    weight, bias = embedding.weight, getattr(embedding, "bias", None)
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(weight.shape[0], PROBE_SHAPE, generator=generator).to(weight.device)
    with evaluating(model), capture(model) as seen:
        actual = model(input_ids=probe).logits.float()
    # From the weight, as every split is: an adapter in the embedding would be seen here.
    rebuilt = logit_map(nn.functional.linear(seen.z, weight, bias).float())
    error = ((rebuilt - actual).abs() / actual.abs().clamp_min(1)).max().item()
    tolerance = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 2e-2
    if not error <= tolerance or logit_map.bias != (bias is not None):
        raise FormatError(
            f"{logit_map} does not reproduce the logits of {type(model).__name__}: they differ by "
            f"{error:.3g} where {tolerance:g} is allowed. Give the scale, bias and soft-cap that "
            "this model applies after its output embedding."
        )
    return error


@torch.no_grad()
def sees_ahead(model: PreTrainedModel) -> bool:
    """Say whether predictions change with the token after them, as an encoder's do.

    BERT and its kin have a class for language modelling, say ``is_decoder: false`` and attend to
    both sides; XLNet and XLM do without saying anything, and resume from no cache. So do a few real
    decoders, hence the look: another last token changes no earlier logit of those.
    """
    config, weight = model.config, next(model.parameters())
    decodes = getattr(config, "is_decoder", None)
    if decodes is None:
        decodes = any(name in CACHES for name in inspect.signature(model.forward).parameters)
    if config.is_encoder_decoder or decodes or weight.device.type == "meta":
        return False
    ids = torch.ones(PROBE_SHAPE, dtype=torch.int64, device=weight.device)
    ids[1, -1] = 2
    with evaluating(model):
        first, second = model(input_ids=ids).logits[:, :-1].float()
    # Half precision may round both alike rows otherwise, by a place or two.
    near = 1e-2 if weight.dtype in (torch.float16, torch.bfloat16) else 1e-5
    return not torch.allclose(first, second, rtol=near, atol=1e-4)


def run_decoder(model: nn.Module, input_ids: Tensor, mask: Tensor | None, **more: bool) -> Any:
    """Run what comes before a language model's output embedding, without a cache.

    Ids and mask are moved to the model's device.
    """
    device = next(model.parameters()).device
    return getattr(model, "base_model", model)(
        input_ids=input_ids.to(device),
        attention_mask=None if mask is None else mask.long().to(device),
        use_cache=False,
        **more,
    )
