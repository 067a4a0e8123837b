"""Splitting every prediction along a token sequence; checked against the model's own logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.errors import DecompositionError
from prismlm.explain.evidence import EvidenceTable
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture, is_unwatched, output_embedding
from prismlm.models.uncertainty_feedback import CODES, uncertainty_of
from prismlm.ops.decomposition import Parts, decompose
from prismlm.ops.prototype_head import Nearest
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.ops.uncertainty_feedback import NO_CODE

TOLERANCE = 1e-3
# bf16 and fp16 models round their own logits; the parts are computed in float32.
LOW_PRECISION_TOLERANCE = 2e-2


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


class SplitPredictions(NamedTuple):
    """The numbers behind the T predictions along one text.

    Attributes:
        routing: the prototypes of each state.
        parts: of the logit of each target.
        model_logits: the model's own, before any soft-cap, [T].
        probabilities: the model's, of each target, [T].
        targets: the token that each prediction is of, [T].
        states: unit hidden states, [T, d].
        rounding: the largest |sum of parts − model's logit| / max(1, |logit|).
        uncertainty: what was fed back at each position, as a share of the largest entropy and as
            a code; None for models without uncertainty feedback.
    """

    routing: Nearest
    parts: Parts
    model_logits: Tensor
    probabilities: Tensor
    targets: Tensor
    states: Tensor
    rounding: float
    uncertainty: list[tuple[float | None, int | None]] | None

    def evidence(self) -> EvidenceTable:
        """Return the evidence that shares are taken from, on the CPU."""
        return EvidenceTable(
            self.routing.indices.cpu(),
            self.parts.evidence.cpu(),
            self.parts.residual_evidence.cpu(),
            self.parts.bias_evidence.cpu(),
            self.states.cpu(),
            self.targets.cpu(),
            self.routing.activations.cpu(),
        )


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
def split_predictions(
    model: PreTrainedModel,
    head: PrototypeHead,
    logit_map: LogitMap,
    ids: Tensor,
    steps: int,
    recorded: Recorded | None = None,
) -> SplitPredictions:
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
    return SplitPredictions(routing, parts, own, probabilities, targets, unit, rounding, fed_back)


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
