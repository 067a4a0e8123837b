"""Splitting every prediction along a token sequence; checked against the model's own logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.errors import DecompositionError
from prismlm.explain.attribution import EvidenceTable
from prismlm.explain.trace import Deferred, PrototypeUse, Step, Steps, TargetFrom
from prismlm.index.lens import Lens
from prismlm.layers import PrototypeHead, PrototypeMixer
from prismlm.models.seam import LogitMap, capture, is_unwatched, output_embedding
from prismlm.models.uncertainty_feedback import CODES, uncertainty_of
from prismlm.ops.decomposition import Parts, decompose
from prismlm.ops.prototype_head import Nearest
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.ops.uncertainty_feedback import NO_CODE

if TYPE_CHECKING:
    from prismlm.explain.chain import PrototypeChain
    from prismlm.explain.direct_path import DirectPath

PROTOTYPES_CHAINED = 3
TOLERANCE = 1e-3
# bf16 and fp16 models round their own logits; the parts are computed in float32.
LOW_PRECISION_TOLERANCE = 2e-2


class Reading(NamedTuple):
    """The numbers behind the steps of one text, T predictions."""

    routing: Nearest
    parts: Parts
    model_logits: Tensor
    probabilities: Tensor
    targets: Tensor
    states: Tensor
    rounding: float
    uncertainty: list[tuple[float | None, int | None]] | None


class Recorded(NamedTuple):
    """What a generation sent through the output embedding, one entry per forward pass.

    Attributes:
        states: its inputs, each [1, positions, d].
        embedded: its outputs W z + b, each [1, positions, V].
        codes: of uncertainty that were fed back, each [1, positions]; none without feedback.
    """

    states: list[Tensor]
    embedded: list[Tensor]
    codes: list[Tensor]


@contextmanager
def record(model: PreTrainedModel) -> Iterator[Recorded]:
    """Keep every position that this thread sends through the output embedding in the block."""
    recorded, thread = Recorded([], [], []), threading.get_ident()

    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if threading.get_ident() == thread and not is_unwatched():
            recorded.states.append(args[0])
            recorded.embedded.append(output)

    def called(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            recorded.codes.append(output[CODES])

    handles = [output_embedding(model).register_forward_hook(after)]
    if uncertainty_of(model) is not None:
        handles.append(model.register_forward_hook(called))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _states(
    model: PreTrainedModel, ids: Tensor, steps: int, recorded: Recorded | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return z [steps, d], W z + b [steps, V] and codes [steps], recorded or of a forward pass."""
    if recorded is not None and sum(z.shape[1] for z in recorded.states) == steps:
        codes = torch.cat(recorded.codes, 1)[0] if recorded.codes else None
        return torch.cat(recorded.states, 1)[0], torch.cat(recorded.embedded, 1)[0], codes
    with capture(model) as seen:
        output = model(input_ids=ids, use_cache=False)
    assert seen.embedded is not None
    codes = output[CODES][0, :steps] if uncertainty_of(model) is not None else None
    return seen.z[0, :steps], seen.embedded[0, :steps], codes


@torch.no_grad()
def read_tokens(
    model: PreTrainedModel,
    head: PrototypeHead,
    logit_map: LogitMap,
    ids: Tensor,
    steps: int,
    recorded: Recorded | None = None,
) -> Reading:
    """Split the first ``steps`` predictions along ``ids`` [1, T].

    The target of prediction t is token t + 1; the last token's target is the model's top token.
    The model runs once, or not at all where its generation of ``ids`` was recorded.

    Raises:
        DecompositionError: the parts of a logit do not sum to the model's own.
    """
    embedding = output_embedding(model)
    weight, bias = embedding.weight, getattr(embedding, "bias", None)
    assert isinstance(weight, Tensor)
    states, embedded, codes = _states(model, ids, steps, recorded)
    z, embedded = states.float(), embedded.float()
    raw, logits = logit_map.before_softcap(embedded), logit_map(embedded)
    targets = torch.cat([ids[0, 1:], logits[-1:].argmax(-1)])[:steps]
    routing = head.nearest(z)
    parts = decompose(
        z,
        routing.indices,
        routing.activations,
        head.prototypes,
        weight.float(),
        targets,
        scale=logit_map.scale,
        bias=None if bias is None else bias.float() * logit_map.scale,
    )
    own = raw.gather(1, targets[:, None])[:, 0]
    rounding = check_sums(parts.logit, own, weight.dtype)
    target_logits = logits.gather(1, targets[:, None])[:, 0]
    probabilities = torch.exp(target_logits - logits.logsumexp(-1))
    unit, fed_back = z * inverse_norms(z), _uncertainty(model, codes)
    return Reading(routing, parts, own, probabilities, targets, unit, rounding, fed_back)


def _uncertainty(
    model: PreTrainedModel, codes: Tensor | None
) -> list[tuple[float | None, int | None]] | None:
    """Return codes as shares of the largest entropy, and codes; None where there is no code."""
    feedback = uncertainty_of(model)
    if feedback is None or codes is None:
        return None
    most = feedback.embedding.levels - 1
    return [(None, None) if code == NO_CODE else (code / most, code) for code in codes.tolist()]


def check_sums(logits: Tensor, own: Tensor, dtype: torch.dtype) -> float:
    """Compare summed parts with the model's own logits; return the largest relative difference.

    Relative to max(1, |logit|). A model in half precision rounds its own logits to 8 or 11 bits;
    the parts are computed in float32 from its states and weights, so the difference is its own.

    Raises:
        DecompositionError: they differ by more than 1e-3·max(1, |logit|), or 2e-2 of it for
            models in half precision, or are not finite.
    """
    exact = dtype in (torch.float32, torch.float64)
    tolerance = TOLERANCE if exact else LOW_PRECISION_TOLERANCE
    error = (logits - own).abs() / own.abs().clamp_min(1)
    if not bool((error <= tolerance).all()):
        worst = int(torch.nan_to_num(error, nan=torch.inf).argmax())
        raise DecompositionError(
            f"at position {worst} the parts sum to {float(logits[worst]):.6g} and the model's own "
            f"logit is {float(own[worst]):.6g}: the head or its logit map does not belong to this "
            "model, or its weights are not finite."
        )
    return float(error.max())


def evidence_table(reading: Reading) -> EvidenceTable:
    """Return the evidence that shares are taken from, on the CPU."""
    return EvidenceTable(
        reading.routing.indices.cpu(),
        reading.parts.evidence.cpu(),
        reading.parts.residual_evidence.cpu(),
        reading.parts.bias_evidence.cpu(),
        reading.states.cpu(),
        reading.routing.activations.cpu(),
    )


def direct_path(
    model: PreTrainedModel, head: PrototypeHead, ids: Tensor
) -> Callable[[], DirectPath] | None:
    """Return what splits the states of ``ids`` [1, T] over channels and tokens when it is called.

    Returns:
        None for models without prototype mixers.
    """
    if not any(isinstance(module, PrototypeMixer) for module in model.modules()):
        return None
    from prismlm.explain.chain import later

    return later(model, head, ids[0])


def build_steps(
    reading: Reading,
    ids: list[int],
    prompt_length: int,
    tokenizer: PreTrainedTokenizerBase,
    lens: Lens | None,
    path: Callable[[], DirectPath] | None = None,
) -> Steps:
    """Turn numbers into steps with names, when they are looked at; each token is decoded once."""
    return Steps(
        len(reading.targets),
        lambda: _build_steps(reading, ids, prompt_length, tokenizer, lens, path),
    )


def _build_steps(
    reading: Reading,
    ids: list[int],
    prompt_length: int,
    tokenizer: PreTrainedTokenizerBase,
    lens: Lens | None,
    path: Callable[[], DirectPath] | None,
) -> tuple[Step, ...]:
    parts = reading.parts
    uses = list(_uses(reading, lens))
    # Whole columns at once: reading single elements of tensors takes longer than the mathematics.
    figures = zip(
        parts.logit.tolist(),
        reading.model_logits.tolist(),
        reading.probabilities.tolist(),
        parts.bias.tolist(),
        parts.residual.tolist(),
        parts.residual_evidence.tolist(),
        parts.explained_share.tolist(),
        uses,
        strict=True,
    )
    decode = cache(lambda token: _decode(tokenizer, token))
    tokens = [decode(token) for token in ids]
    chains = [None if path is None else _chains(path, t, u, tokens) for t, u in enumerate(uses)]
    fed_back = reading.uncertainty or [(None, None)] * len(uses)
    return tuple(
        Step(
            t,
            tokens[t],
            ids[t],
            decode(target),
            target,
            _target_from(t, prompt_length, len(ids)),
            *row,
            uncertainty=fed_back[t][0],
            uncertainty_code=fed_back[t][1],
            chains=chains[t],
        )
        for t, (target, row) in enumerate(zip(reading.targets.tolist(), figures, strict=True))
    )


def _uses(reading: Reading, lens: Lens | None) -> Iterator[tuple[PrototypeUse, ...]]:
    """Yield the prototypes in use at each position, by contribution, largest first."""
    routing, parts = reading.routing, reading.parts
    # Those that are not in use come last.
    keys = parts.contributions.masked_fill(routing.activations <= 0, -torch.inf)
    order = keys.argsort(dim=1, descending=True, stable=True)
    columns = (
        column.gather(1, order).tolist()
        for column in (
            routing.indices,
            routing.activations,
            routing.cosines,
            parts.contributions,
            parts.evidence,
        )
    )
    counts = (routing.activations > 0).sum(1).tolist()
    for count, (indices, *figures) in zip(counts, zip(*columns, strict=True), strict=True):
        used = indices[:count]
        names: list[str | None] = [None] * count
        categories = names
        if lens is not None:
            names = [lens.names[i] for i in used]
            categories = [lens.categories[i] for i in used]
        # As many as are in use: figures of the others are cut off with them.
        yield tuple(map(PrototypeUse, used, *figures, names, categories))


def _chains(
    path: Callable[[], DirectPath],
    position: int,
    uses: tuple[PrototypeUse, ...],
    tokens: Sequence[str],
) -> Sequence[PrototypeChain]:
    leading = uses[:PROTOTYPES_CHAINED]

    def build() -> tuple[PrototypeChain, ...]:
        from prismlm.explain.chain import Used, chains

        own = Used(
            torch.tensor([use.id for use in leading]),
            [use.activation for use in leading],
            [use.contribution for use in leading],
        )
        return chains(path(), position, own, tokens)

    return Deferred(len(leading), build)


def _target_from(position: int, prompt_length: int, length: int) -> TargetFrom:
    if position + 1 >= length:
        return "argmax"
    return "text" if position + 1 < prompt_length else "generated"


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, ...]:
    """Return each token as steps show it."""
    return tuple(_decode(tokenizer, token) for token in ids)


def _decode(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    if tokenizer.is_fast:
        # What the line below comes down to, at a third of the time.
        backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009
        return str(backend.decode([token], skip_special_tokens=False))
    return str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
