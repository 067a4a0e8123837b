"""Splitting every prediction along a token sequence; checked against the model's own logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.errors import DecompositionError
from prismlm.layers import PrototypeHead
from prismlm.lens.attribution import EvidenceTable
from prismlm.lens.directory import Lens
from prismlm.lens.trace import PrototypeUse, Step, TargetFrom
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.ops.decomposition import Parts, decompose
from prismlm.ops.prototype_head import Routing
from prismlm.ops.prototype_head.routing import inverse_norms

TOLERANCE = 1e-3
# bf16 and fp16 models round their own logits; the parts are computed in float32.
LOW_PRECISION_TOLERANCE = 2e-2


class Reading(NamedTuple):
    """The numbers behind the steps of one text, T predictions."""

    routing: Routing
    parts: Parts
    model_logits: Tensor
    probabilities: Tensor
    targets: Tensor
    states: Tensor
    rounding: float


@torch.no_grad()
def read_tokens(
    model: PreTrainedModel, head: PrototypeHead, logit_map: LogitMap, ids: Tensor, steps: int
) -> Reading:
    """Run the model once over ``ids`` [1, T] and split its first ``steps`` predictions.

    The target of prediction t is token t + 1; the last token's target is the model's top token.

    Raises:
        DecompositionError: the parts of a logit do not sum to the model's own.
    """
    embedding = output_embedding(model)
    weight, bias = embedding.weight, getattr(embedding, "bias", None)
    assert isinstance(weight, Tensor)
    with capture(model) as seen:
        model(input_ids=ids, use_cache=False)
    assert seen.embedded is not None
    z = seen.z[0, :steps].float()
    raw = logit_map.before_softcap(seen.embedded[0, :steps].float())
    logits = logit_map(seen.embedded[0, :steps].float())
    targets = torch.cat([ids[0, 1:], logits[-1:].argmax(-1)])[:steps]
    routing = head(z).routing
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
    probabilities = logits.softmax(-1).gather(1, targets[:, None])[:, 0]
    states = z * inverse_norms(z)
    return Reading(routing, parts, own, probabilities, targets, states, rounding)


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
    )


def build_steps(
    reading: Reading,
    ids: list[int],
    prompt_length: int,
    tokenizer: PreTrainedTokenizerBase,
    lens: Lens | None,
) -> tuple[Step, ...]:
    """Turn numbers into steps with names; one decoding per token."""
    routing, parts = reading.routing, reading.parts
    columns = zip(
        routing.indices.tolist(),
        routing.activations.tolist(),
        routing.cosines.tolist(),
        parts.contributions.tolist(),
        parts.evidence.tolist(),
        strict=True,
    )
    uses = [_uses(*column, lens=lens) for column in columns]
    explained = parts.explained_share.tolist()
    steps: list[Step] = []
    for t, target in enumerate(reading.targets.tolist()):
        steps.append(
            Step(
                position=t,
                token=_decode(tokenizer, ids[t]),
                token_id=ids[t],
                target=_decode(tokenizer, target),
                target_id=target,
                target_from=_target_from(t, prompt_length, len(ids)),
                logit=float(parts.logit[t]),
                model_logit=float(reading.model_logits[t]),
                probability=float(reading.probabilities[t]),
                bias=float(parts.bias[t]),
                residual=float(parts.residual[t]),
                residual_evidence=float(parts.residual_evidence[t]),
                explained_share=explained[t],
                prototypes=uses[t],
            )
        )
    return tuple(steps)


def _uses(
    indices: list[int],
    activations: list[float],
    cosines: list[float],
    contributions: list[float],
    evidence: list[float],
    *,
    lens: Lens | None,
) -> tuple[PrototypeUse, ...]:
    uses = [
        PrototypeUse(
            i,
            a,
            c,
            contribution,
            e,
            None if lens is None else lens.names[i],
            None if lens is None else lens.categories[i],
        )
        for i, a, c, contribution, e in zip(
            indices, activations, cosines, contributions, evidence, strict=True
        )
        if a > 0
    ]
    return tuple(sorted(uses, key=lambda use: -use.contribution))


def _target_from(position: int, prompt_length: int, length: int) -> TargetFrom:
    if position + 1 >= length:
        return "argmax"
    return "text" if position + 1 < prompt_length else "generated"


def _decode(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
