"""The seam: the last hidden state z of a Hugging Face decoder, and its output embedding W."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from prismlm.errors import FormatError, InputError, check_finite
from prismlm.models.watch import Hook, evaluating, watch
from prismlm.progress import SILENT, Reporter

PROBE_SHAPE = (2, 8)
READABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Names of a cache, as an argument and in the output.
CACHES = ("past_key_values", "cache_params")
# Tokens of :func:`read_texts` at once.
BATCH_TOKENS = 2048


def lacks(model: nn.Module, what: str, way_out: str = "choose another model") -> InputError:
    """Return the error for a model of the wrong kind."""
    kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    return InputError(f"a model of type {kind!r} has no {what}: {way_out}.")


@dataclass(frozen=True)
class LogitMap:
    """The map from W z to logits: softcap · tanh(l / softcap) with l = scale · (W z + b).

    Attributes:
        scale: the factor of Cohere (``logit_scale``) and Granite (1 / ``logits_scaling``).
        bias: whether the output embedding has a bias b.
        softcap: the cap of Gemma (``final_logit_softcapping``), or None.
    """

    scale: float = 1.0
    bias: bool = False
    softcap: float | None = None

    @classmethod
    def of(cls, model: nn.Module) -> LogitMap:
        """Read the map from a model's configuration; see :func:`verify_logit_map`."""
        config = getattr(model, "config", None)
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        has_bias = getattr(output_embedding(model), "bias", None) is not None
        return cls(scale, has_bias, None if softcap is None else float(softcap))

    def before_softcap(self, embedded: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Apply the scale to W z + b."""
        return embedded if self.scale == 1.0 else embedded * self.scale

    def __call__(self, embedded: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Apply scale and soft-cap to W z + b."""
        logits = self.before_softcap(embedded)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass
class Captured:
    """Input z [B, T, d] and output W z + b [B, T, V] of the output embedding in a forward pass."""

    z: Tensor = field(default_factory=lambda: torch.empty(0))
    embedded: Tensor | None = None


def output_embedding(model: nn.Module) -> nn.Module:
    """Return the module with W; raise InputError if there is none, or if W is quantised."""
    getter = getattr(model, "get_output_embeddings", None)
    embedding = getter() if getter is not None else None
    weight = getattr(embedding, "weight", None)
    kind = type(model).__name__
    if embedding is None or weight is None:
        raise InputError(
            f"{kind} has no output embedding: load it with a language modelling head, which "
            "get_output_embeddings() returns."
        )
    # Sharded weights are gathered where they are used; other wrappers do not contain W.
    wrapped = hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "full_tensor")
    if wrapped or weight.dtype not in READABLE:
        name = next((name for name, module in model.named_modules() if module is embedding), "")
        raise InputError(
            f"the output embedding {name} of {kind} is quantised (its weight is "
            f"{type(weight).__name__} of {str(weight.dtype).removeprefix('torch.')}), and logits "
            "are split by the weight itself. Exclude it from quantisation, for example with "
            f"modules_to_not_convert=[{name!r}], or use the original model."
        )
    return embedding


def decoder_and_embeddings(model: PreTrainedModel) -> tuple[nn.Module, Any]:
    """Return a language model's decoder and input embeddings (of weight [V, d]).

    The embeddings of an encoder-decoder are the decoder's, since T5's halves have separate modules
    with one tied weight.
    """
    try:
        inner: Any = model.get_decoder()
        inputs = (inner if model.config.is_encoder_decoder else model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        inner, inputs = None, None
    # Hooks on the whole model would run before the model's own.
    if inner is None or inner is model or not isinstance(getattr(inputs, "weight", None), Tensor):
        raise InputError(
            f"a {type(model).__name__} does not declare its decoder and input embeddings: define "
            "get_decoder() and get_input_embeddings()."
        )
    return inner, inputs


@contextmanager
def capture(model: nn.Module, *, logits: bool = True) -> Iterator[Captured]:
    """Capture input and output of the output embedding in this thread's passes.

    With ``logits=False`` the output embedding gets no positions, so no logits are computed.
    """
    captured = Captured()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        captured.z = args[0]
        return None if logits else ((args[0][..., :0, :], *args[1:]), kwargs)

    def after(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        captured.embedded = output

    with watch([Hook(output_embedding(model), before, after if logits else None)]):
        yield captured


def last_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], counts: Sequence[int]
) -> Float[Tensor, "N d"]:
    """Return the last hidden states z of the last ``counts`` tokens of rows, one row after another.

    Rows are padded on the right, which a causal model does not see, and the output embedding is
    not computed.
    """
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    with capture(model, logits=False) as captured:
        model(input_ids=ids.to(model.device), use_cache=False)
    ends = zip(captured.z, rows, counts, strict=True)
    return torch.cat([z[len(row) - count : len(row)] for z, row, count in ends])


def last_logits(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Float[Tensor, "B V"]:
    """Return a model's own logits after each row of tokens, float32, on the CPU.

    Only the last position of a row, padded as in :func:`last_states`, goes through the output
    embedding, the largest part of a small model.
    """
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    ends = torch.tensor([len(row) - 1 for row in rows])[:, None, None]

    def last(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0].take_along_dim(ends.to(args[0].device), 1), *args[1:]), kwargs

    with evaluating(model), watch([Hook(output_embedding(model), last)]):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits[:, 0].float().cpu()
    check_finite(f"logits of {type(model).__name__}", logits)
    return logits


class Text(NamedTuple):
    """Tokens of a text; those from ``start`` on are predicted."""

    ids: list[int]
    start: int


class Read(NamedTuple):
    """States before N predicted tokens, these tokens, and the number of each one's text."""

    z: Tensor
    targets: Tensor
    text: Tensor


@torch.no_grad()
def read_texts(
    model: PreTrainedModel,
    texts: Sequence[Text],
    before: Sequence[int] = (),
    progress: Reporter = SILENT,
) -> Read:
    """Run a model over texts, each after the tokens ``before``, in batches of like lengths.

    Texts that differ in their last token alone share a row. Longer texts come first.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, (ids, _) in enumerate(texts):
        rows.setdefault((*before, *(ids[:-1] or ids)), []).append(number)
    order, parts = sorted(rows, key=len), list[tuple[Tensor, Tensor, Tensor]]()
    with evaluating(model), progress.task("Reading", len(order), "texts") as task:
        while order:
            size = max(1, BATCH_TOKENS // (len(order[-1]) + 1))
            batch, order = order[-size:], order[:-size]
            counts = [max(len(texts[n].ids) - texts[n].start for n in rows[row]) for row in batch]
            states = last_states(model, batch, counts).split(counts)
            for z, row in zip(states, batch, strict=True):
                for number in rows[row]:
                    tokens = torch.tensor(texts[number].ids[texts[number].start :], device=z.device)
                    own = z[len(z) - len(tokens) :]
                    parts.append((own, tokens, torch.full_like(tokens, number)))
            task.advance(len(batch))
    return Read(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def verify_logit_map(model: nn.Module, logit_map: LogitMap) -> float:
    """Check W, b and the map on a probe batch; return the largest error over max(1, |logit|).

    Raises FormatError if they do not reproduce the model's logits.
    """
    embedding = output_embedding(model)
    weight, bias = embedding.weight, getattr(embedding, "bias", None)
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(weight.shape[0], PROBE_SHAPE, generator=generator).to(weight.device)
    with evaluating(model), capture(model) as seen:
        actual = model(input_ids=probe).logits.float()
    check_finite(f"the logits of {type(model).__name__}", actual)
    # From the weight, so that an adapter in the embedding is noticed.
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
    """Return whether logits change with later tokens, as in an encoder.

    BERT has a class for language modelling with ``is_decoder: false``; XLNet and XLM declare
    nothing and have no cache. Some real decoders neither, hence the test.
    """
    config, weight = model.config, next(model.parameters())
    is_decoder = getattr(config, "is_decoder", None)
    if is_decoder is None:
        is_decoder = any(name in CACHES for name in inspect.signature(model.forward).parameters)
    if config.is_encoder_decoder or is_decoder or weight.device.type == "meta":
        return False
    ids = torch.ones(PROBE_SHAPE, dtype=torch.int64, device=weight.device)
    ids[1, -1] = 2
    with evaluating(model):
        first, second = model(input_ids=ids).logits[:, :-1].float()
    # Half precision may round equal rows differently.
    near = 1e-2 if weight.dtype in (torch.float16, torch.bfloat16) else 1e-5
    return not torch.allclose(first, second, rtol=near, atol=1e-4)


def run_decoder(model: nn.Module, input_ids: Tensor, mask: Tensor | None, **more: bool) -> Any:
    """Run a language model up to its output embedding, without a cache, on the model's device."""
    device = next(model.parameters()).device
    return getattr(model, "base_model", model)(
        input_ids=input_ids.to(device),
        attention_mask=None if mask is None else mask.long().to(device),
        use_cache=False,
        **more,
    )
