"""Predictions split into prototypes, residual and bias, checked against the model's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.errors import DecompositionError
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.models.uncertainty_feedback import CODES, replay, uncertainty_of
from prismlm.models.watch import evaluating
from prismlm.ops.prototype_head import Nearest, Routing
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.ops.uncertainty_feedback import NO_CODE

# Median explained shares beyond these are not those of a head that was fitted to the model.
MIN_EXPLAINED, MAX_EXPLAINED = -0.5, 1.5
MISFIT = "The prototype head does not fit this model: {}. Attach a new one."


class Parts(NamedTuple):
    """The logit of one target token per state, split; N states, k prototypes each.

    Contributions, residual and bias sum to the logit; the evidence of all parts sums to the logit
    minus its mean over the vocabulary.
    """

    contributions: Float[Tensor, "N k"]
    evidence: Float[Tensor, "N k"]
    residual: Float[Tensor, " N"]
    residual_evidence: Float[Tensor, " N"]
    bias: Float[Tensor, " N"]
    bias_evidence: Float[Tensor, " N"]

    @property
    def logit(self) -> Float[Tensor, " N"]:
        """The sum of all parts, before any soft-cap."""
        return self.contributions.sum(-1) + self.residual + self.bias

    @property
    def explained_share(self) -> Float[Tensor, " N"]:
        """Σ e_i / (Σ e_i + e_residual + e_bias), in terms of evidence."""
        explained = self.evidence.sum(-1)
        return explained / (explained + self.residual_evidence + self.bias_evidence)


class OutputLayer(NamedTuple):
    """The map from states to logits, in float32: W [V, d], b [V] or None, and the mean row of W.

    ``dtype`` is the model's own.
    """

    weight: Tensor
    bias: Tensor | None
    mean: Tensor
    logit_map: LogitMap
    dtype: torch.dtype

    @classmethod
    def from_model(cls, model: nn.Module, logit_map: LogitMap) -> OutputLayer:
        """Return the output layer of a model."""
        embedding: Any = output_embedding(model)
        weight = embedding.weight.detach().float()
        bias = getattr(embedding, "bias", None)
        bias = None if bias is None else bias.detach().float()
        # As a product, the mean over the rows takes half the time of weight.mean(0).
        mean = weight.new_full((len(weight),), 1 / len(weight)) @ weight
        return cls(weight, bias, mean, logit_map, embedding.weight.dtype)

    def logits(self, z: Tensor) -> Tensor:
        """Return the logits of states."""
        return self.logit_map(F.linear(z, self.weight, self.bias))

    def targets(self, ids: Tensor, raw: Tensor) -> Tensor:
        """Return the token after each state of a text [T]; after its last, the model's top one.

        ``raw`` is W z + b of the states, [N, V].
        """
        top = self.logit_map(raw[-1:].float()).argmax(-1)
        return torch.cat([ids[1:], top])[: len(raw)]

    def scores(self, raw: Tensor, targets: Tensor) -> Scores:
        """Return the scores of targets, from W z + b, [N, V]."""
        raw = raw.float()
        uncapped, logits = self.logit_map.before_softcap(raw), self.logit_map(raw)
        # log_softmax and max take a fraction of the time of logsumexp and argmax on a CPU.
        target_logits, log_probabilities = (
            column.gather(1, targets[:, None])[:, 0]
            for column in (uncapped, logits.log_softmax(-1))
        )
        return Scores(target_logits, log_probabilities, logits.max(-1).indices)

    def parts(
        self, prototypes: Tensor, z: Tensor, routing: Nearest | Routing, targets: Tensor
    ) -> Parts:
        """Split scale · (W z + b) at each state's target token v.

        contribution_i = scale · α_i (W p_i)[v], and residual = scale · (W r)[v] with the vector
        r = z − Σ α_i p_i. Evidence subtracts each part's mean over the vocabulary, to which a
        softmax is blind: e_i = scale · α_i (W_v − W̄)·p_i.
        """
        indices, activations, scale = routing.indices, routing.activations, self.logit_map.scale
        # index_select gathers several times as fast as indexing over one dimension, and sums of
        # products are faster than batches of small matrix products.
        chosen = prototypes.index_select(0, indices.flatten()).view(*indices.shape, -1)
        rows = self.weight[targets]
        centred, weighted = rows - self.mean, scale * activations
        residual = z - torch.einsum("nk,nkd->nd", activations, chosen)
        bias = self.mean.new_zeros(1).expand(len(self.weight))
        if self.bias is not None:
            bias = self.bias * scale
        return Parts(
            weighted * (chosen * rows[:, None]).sum(-1),
            weighted * (chosen * centred[:, None]).sum(-1),
            scale * (residual * rows).sum(-1),
            scale * (residual * centred).sum(-1),
            bias[targets],
            bias[targets] - bias.mean(),
        )


class Scores(NamedTuple):
    """The model's own figures, [N] each."""

    logits: Tensor  # of the targets, before any soft-cap
    log_probabilities: Tensor
    top: Tensor  # the model's top tokens


@dataclass(frozen=True)
class Predictions:
    """T predictions of one text, split; k prototypes each."""

    routing: Nearest  # indices, cosines and activations of each state's prototypes, [T, k]
    parts: Parts  # of the logit of each target
    score: Callable[[], Scores]  # returns :attr:`scores`
    tokens: Tensor  # the last token read, [T]
    targets: Tensor  # the predicted token, [T]
    states: Tensor  # unit hidden states, [T, d]
    # Codes of the uncertainty that was fed back, int64 [1, T], to replay the pass; or None.
    codes: Tensor | None = None

    @cached_property
    def scores(self) -> Scores:
        """The model's own figures of the targets, computed on first use: shares need none."""
        return self.score()

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice | list[int]) -> Predictions:
        """Return some of the predictions as a text of their own, without what was fed back."""
        return replace(self, codes=None)._map(lambda column: column[rows])

    def cpu(self) -> Predictions:
        """Return the predictions on the CPU."""
        return self._map(Tensor.cpu)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Predictions:
        return Predictions(
            Nearest(*map(change, self.routing)),
            Parts(*map(change, self.parts)),
            lambda: Scores(*map(change, self.scores)),
            *map(change, (self.tokens, self.targets, self.states)),
            codes=None if self.codes is None else change(self.codes),
        )

    @property
    def evidence(self) -> Tensor:
        """The evidence of each prototype for the target, [T, k]."""
        return self.parts.evidence

    def uses(self, weights: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return prediction, prototype and weight of each use with a positive one, [u] each.

        ``weights`` are evidence or activations, [T, k]; uses are in the order of predictions.
        """
        prediction, slot = used = (weights > 0).nonzero(as_tuple=True)
        prototype = self.routing.indices[used].numpy()
        return prediction.numpy(), prototype, weights[prediction, slot].double().numpy()

    def warnings(self) -> list[str]:
        """Return what is wrong with model or head, by figures that no working ones have."""
        count = len(self)
        if not count:
            return []
        zero = int((~(self.states.norm(dim=1) > 0.5)).sum())
        if zero:
            return [
                f"The hidden states of {zero:,} of {count:,} predictions are zero, so nothing in "
                "the corpus is near to them: the model's weights, such as its final norm, are "
                "damaged."
            ]
        if not self.evidence.any():
            return [MISFIT.format("no prototype is active")]
        return misfit(float(self.parts.explained_share.median()))


class PrototypeUse(NamedTuple):
    """One prototype's part in one prediction."""

    id: int  # its number
    activation: float  # α > 0
    cosine: float  # to the hidden state
    contribution: float  # scale · α (W p)[target], in logits
    evidence: float  # contribution minus its mean over the vocabulary
    name: str | None = None  # from the lens; None without one
    category: str | None = None


def misfit(explained_share: float) -> list[str]:
    """Return a warning unless a median explained share can be of a head fitted to the model."""
    if MIN_EXPLAINED <= explained_share <= MAX_EXPLAINED:
        return []
    why = f"the median explained share is {explained_share:,.0%}, where 0% to 100% can be"
    return [MISFIT.format(why)]


def split_states(
    output: OutputLayer,
    head: PrototypeHead,
    z: Tensor,
    tokens: Tensor,
    targets: Tensor,
    *,
    raw_logits: Tensor | None = None,
    target_logits: Tensor | None = None,
) -> Predictions:
    """Split the logits of targets [N] at states z [N, d], and check their sums.

    Of the model's own figures, either W z + b [N, V] or the logits of the last targets are given.
    """
    z = z.float()
    scores = None if raw_logits is None else output.scores(raw_logits, targets)

    def score() -> Scores:
        return scores or output.scores(F.linear(z, output.weight, output.bias), targets)

    target_logits = scores.logits if scores else target_logits
    assert target_logits is not None
    routing = head.nearest(z)
    parts = output.parts(head.prototypes, z, routing, targets)
    check_sums(parts.logit, target_logits, output.dtype)
    return Predictions(routing, parts, score, tokens, targets, z * inverse_norms(z))


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative error allowed of sums: half-precision models round their own figures."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 2e-2


def check_sums(logits: Tensor, target_logits: Tensor, dtype: torch.dtype) -> None:
    """Raise DecompositionError unless sums of parts are the model's own logits.

    The model's logits are those of the last positions, or of all. A model in half precision rounds
    them to 8 or 11 bits, while parts are computed in float32 from its states and weights.
    """
    tolerance, first = tolerance_of(dtype), len(logits) - len(target_logits)
    logits = logits[first:]
    error = (logits - target_logits).abs() / target_logits.abs().clamp_min(1)
    if not bool((error <= tolerance).all()):
        worst = int(torch.nan_to_num(error, nan=torch.inf).argmax())
        raise DecompositionError(
            f"at position {first + worst} the parts sum to {float(logits[worst]):.6g} and the "
            f"model's own logit is {float(target_logits[worst]):.6g}: the head or its logit map "
            "does not belong to this model, or its weights are not finite."
        )


@torch.no_grad()
def split_predictions(
    model: PreTrainedModel,
    head: PrototypeHead,
    output: OutputLayer,
    ids: Tensor,
    steps: int,
    codes: list[Tensor] | None = None,
) -> Predictions:
    """Split the first ``steps`` predictions along ``ids`` [1, T], read in one pass.

    ``codes`` are those of :func:`recording_codes` while the text was generated, to be fed again.
    """
    with evaluating(model), capture(model) as seen:
        run = model(**replay(ids[:, :steps], codes), use_cache=False)
    assert seen.embedded is not None
    z, raw = seen.z[0], seen.embedded[0]
    targets = output.targets(ids[0], raw)
    split = split_states(output, head, z, ids[0, :steps], targets, raw_logits=raw)
    return replace(split, codes=run[CODES] if uncertainty_of(model) is not None else None).cpu()


def fed_back(model: PreTrainedModel, codes: Tensor | None) -> list[tuple[float, int] | None] | None:
    """Return codes [T] as shares of the largest entropy and as numbers; None where none is fed."""
    feedback = uncertainty_of(model)
    if feedback is None or codes is None:
        return None
    largest = feedback.embedding.levels - 1
    return [None if code == NO_CODE else (code / largest, code) for code in codes.tolist()]
