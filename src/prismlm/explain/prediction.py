"""Predictions split into prototypes, residual and bias, checked against the model's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.errors import DecompositionError, PrismError
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.models.uncertainty_feedback import CODES, replay, uncertainty_of
from prismlm.models.watch import Hook, watch
from prismlm.ops.prototype_head import Nearest, Routing
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.ops.uncertainty_feedback import NO_CODE

FedBack = list[tuple[float | None, int | None]]


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


def decompose(
    z: Float[Tensor, "N d"],
    indices: Int64[Tensor, "N k"],
    activations: Float[Tensor, "N k"],
    prototypes: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    targets: Int64[Tensor, " N"],
    *,
    scale: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    weight_mean: Float[Tensor, " d"] | None = None,
) -> Parts:
    """Split scale · W z + bias at each state's target token v.

    contribution_i = scale · α_i (W p_i)[v] and residual = scale · (W r)[v] with r = z − Σ α_i p_i
    taken as a vector. Evidence subtracts each part's mean over the vocabulary, to which a softmax
    is blind: e_i = scale · α_i (W_v − W̄)·p_i. ``weight_mean`` is W̄, if it is at hand, and
    ``scale`` the model's own factor on W z, 1 for most families.
    """
    # Over one dimension, index_select gathers several times as fast as indexing does; and sums of
    # products are quicker than batches of small matrix products.
    chosen = prototypes.index_select(0, indices.flatten()).view(*indices.shape, -1)
    mean = weight.mean(0) if weight_mean is None else weight_mean
    rows = weight[targets]
    centred = rows - mean
    weighted = scale * activations
    residual = z - torch.einsum("nk,nkd->nd", activations, chosen)
    none = z.new_zeros(z.shape[0])
    return Parts(
        weighted * (chosen * rows[:, None]).sum(-1),
        weighted * (chosen * centred[:, None]).sum(-1),
        scale * (residual * rows).sum(-1),
        scale * (residual * centred).sum(-1),
        none if bias is None else bias[targets],
        none if bias is None else bias[targets] - bias.mean(),
    )


class OutputLayer(NamedTuple):
    """What turns states into logits, in float32.

    Attributes:
        weight: W, [V, d].
        bias: b, [V], or None.
        mean: the mean row of W, [d].
        logit_map: what the model does after W z + b.
        dtype: the model's own.
    """

    weight: Tensor
    bias: Tensor | None
    mean: Tensor
    logit_map: LogitMap
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module, logit_map: LogitMap) -> OutputLayer:
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

    def parts(
        self, head: PrototypeHead, z: Tensor, routing: Nearest | Routing, targets: Tensor
    ) -> Parts:
        """Split the logit of each state's target."""
        scale = self.logit_map.scale
        bias = None if self.bias is None else self.bias * scale
        of_routing = routing.indices, routing.activations, head.prototypes
        how: dict[str, Any] = {"scale": scale, "bias": bias, "weight_mean": self.mean}
        return decompose(z, *of_routing, self.weight, targets, **how)


class Scores(NamedTuple):
    """What the model said of N targets.

    Attributes:
        logits: the model's own of the targets, before any soft-cap, [N].
        log_probabilities: of the targets, [N].
        top: the model's top tokens, [N].
    """

    logits: Tensor
    log_probabilities: Tensor
    top: Tensor

    @classmethod
    def of(cls, logit_map: LogitMap, embedded: Tensor, targets: Tensor) -> Scores:
        """Return the scores of targets, from W z + b, [N, V]."""
        embedded = embedded.float()
        raw, logits = logit_map.before_softcap(embedded), logit_map(embedded)
        # log_softmax and max take a fraction of the time of logsumexp and argmax on a CPU.
        columns = raw, logits.log_softmax(-1)
        own, log_probabilities = (one.gather(1, targets[:, None])[:, 0] for one in columns)
        return cls(own, log_probabilities, logits.max(-1).indices)


@dataclass(frozen=True)
class Predictions:
    """T predictions of one text, split; k prototypes each.

    Attributes:
        routing: the prototypes of each state: indices, cosines and activations, [T, k].
        parts: of the logit of each target.
        score: returns what the model said of the targets, see :attr:`scores`.
        read, targets: the last token read, and the predicted one, [T] each.
        states: unit hidden states, [T, d].
        rounding: the largest |sum of parts − model's logit| / max(1, |logit|).
        fed_back: what uncertainty feedback gave to each position, as a share of the largest entropy
            and as a code; None without it.
        codes: the same codes, int64 [1, T], to read the text again as it was read.
    """

    routing: Nearest
    parts: Parts
    score: Callable[[], Scores]
    read: Tensor
    targets: Tensor
    states: Tensor
    rounding: float = 0.0
    fed_back: FedBack | None = None
    codes: Tensor | None = None

    @cached_property
    def scores(self) -> Scores:
        """What the model said of the targets: shares need none of it."""
        return self.score()

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice | list[int]) -> Predictions:
        """Return some of the predictions as a text of their own, without what was fed back."""
        return replace(self, fed_back=None, codes=None)._each(lambda column: column[rows])

    def cpu(self) -> Predictions:
        """Return the predictions on the CPU."""
        return self._each(Tensor.cpu)

    def _each(self, change: Any) -> Predictions:
        columns: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "score":
                columns["score"] = lambda: Scores(*(change(column) for column in self.scores))
            elif isinstance(value, Tensor):
                columns[one.name] = change(value)
            elif isinstance(value, (Nearest, Parts)):
                columns[one.name] = value._make(change(column) for column in value)
        return replace(self, **columns)

    @property
    def evidence(self) -> Tensor:
        """The evidence of each prototype for the target, [T, k]."""
        return self.parts.evidence

    @property
    def beside(self) -> np.ndarray:
        """Positive evidence of residual and bias, which no training text carries: float64 [T]."""
        residual, bias = self.parts.residual_evidence.double(), self.parts.bias_evidence.double()
        return (residual.clamp_min(0) + bias.clamp_min(0)).numpy()

    def uses(self, method: Literal["evidence", "source"] = "evidence") -> Uses:
        """Return the uses of prototypes with positive evidence, or activation; none is netted."""
        weights = self.evidence if method == "evidence" else self.routing.activations
        prediction, slot = (weights > 0).nonzero(as_tuple=True)
        prototype = self.routing.indices[prediction, slot].numpy()
        return Uses(prediction.numpy(), prototype, weights[prediction, slot].double().numpy())


class Uses(NamedTuple):
    """Uses of prototypes, in the order of predictions; [u] each.

    Attributes:
        prediction, prototype: int64.
        weight: positive evidence, or α; float64.
    """

    prediction: np.ndarray
    prototype: np.ndarray
    weight: np.ndarray


def split_states(
    output: OutputLayer,
    head: PrototypeHead,
    z: Tensor,
    embedded: Tensor,
    read: Tensor,
    targets: Tensor,
    inverse: Tensor | None = None,
) -> Predictions:
    """Split the logits of targets, and check their sums.

    Args:
        output, head: of the model.
        z: states as the output embedding took them, [N, d].
        embedded: W z + b as the model computed them, [N, V].
        read, targets: the tokens read last and those predicted, [N] each.
        inverse: 1/‖p‖ of the prototypes, [K, 1], where they are known already.

    Raises:
        DecompositionError: the parts of a logit do not sum to the model's own.
    """
    scores = Scores.of(output.logit_map, embedded, targets)
    split = _split(output, head, z, read, targets, scores.logits, inverse)
    return replace(split, score=lambda: scores)


def _split(
    output: OutputLayer,
    head: PrototypeHead,
    z: Tensor,
    read: Tensor,
    targets: Tensor,
    own: Tensor,
    inverse: Tensor | None = None,
) -> Predictions:
    """Split as :func:`split_states`, where the model's own logits of the last targets are known."""
    z = z.float()
    routing = head.nearest(z, inverse)
    parts = output.parts(head, z, routing, targets)
    return Predictions(
        routing,
        parts,
        lambda: Scores.of(output.logit_map, F.linear(z, output.weight, output.bias), targets),
        read,
        targets,
        z * inverse_norms(z),
        check_sums(parts.logit, own, output.dtype),
    )


def tolerance_of(dtype: torch.dtype) -> float:
    """Return how far sums may be off: models in half precision round their own figures."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 2e-2


def check_sums(logits: Tensor, own: Tensor, dtype: torch.dtype) -> float:
    """Compare summed parts with the model's own logits; return the largest relative difference.

    Relative to max(1, |logit|). The model's own are of the last positions, or of all. A model in
    half precision rounds its own logits to 8 or 11 bits; the parts are computed in float32 from its
    states and weights, so the difference is its own.
    """
    tolerance, first = tolerance_of(dtype), len(logits) - len(own)
    logits = logits[first:]
    error = (logits - own).abs() / own.abs().clamp_min(1)
    if not bool((error <= tolerance).all()):
        worst = int(torch.nan_to_num(error, nan=torch.inf).argmax())
        raise DecompositionError(
            f"at position {first + worst} the parts sum to {float(logits[worst]):.6g} and the "
            f"model's own logit is {float(own[worst]):.6g}: the head or its logit map does not "
            "belong to this model, or its weights are not finite."
        )
    return float(error.max())


class Recorded(NamedTuple):
    """What a generation sent through the output embedding, one entry per forward pass.

    Attributes:
        states: its inputs, each [1, positions, d].
        embedded: its outputs W z + b, each [1, positions, V].
        codes: of uncertainty that were fed back, each [1, positions]; none without feedback.
        read: the tokens that each pass read, each [1, tokens].
    """

    states: list[Tensor]
    embedded: list[Tensor]
    codes: list[Tensor]
    read: list[Tensor]

    def is_of(self, ids: Tensor) -> bool:
        """Say whether there is a state after each of ``ids`` [1, T], which may go on further.

        A model that keeps only the last position of its prompt, or reads all tokens anew in each
        pass, has no such states. If the passes read other tokens, that is a PrismError.
        """
        if not self.read:
            return False
        read = torch.cat(self.read, 1) if len({len(one) for one in self.read}) == 1 else ids[:, :0]
        if torch.equal(read[:, : ids.shape[1]], ids):
            return [z.shape[:2] for z in self.states] == [one.shape for one in self.read]
        pairs = ((one, ids[:, : one.shape[1]]) for one in self.read)
        if not all(torch.equal(one[:, : known.shape[1]], known) for one, known in pairs):
            raise PrismError(
                "the model's generate() returned other tokens than its forward passes read, so "
                "that the states are of another text than the answer. Write the text with the "
                "model itself, and explain it as it is, with generate=0."
            )
        return False


class Kept(NamedTuple):
    """What an engine keeps of a text while it writes it, by the token.

    Attributes:
        states: what entered the output embedding after each token but the last, [T − 1, d].
        own: the model's own logit of each token that it wrote, before any soft-cap, [n].
    """

    states: Tensor
    own: Tensor


@contextmanager
def record(model: PreTrainedModel) -> Iterator[Recorded]:
    """Keep every position that this thread sends through the output embedding in the block."""
    recorded = Recorded([], [], [], [])
    feeds_back = uncertainty_of(model) is not None

    def after(_: nn.Module, args: tuple[Tensor, ...], kwargs: Any, output: Tensor) -> None:
        recorded.states.append(args[0])
        recorded.embedded.append(output)

    def called(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if (ids := kwargs.get("input_ids", *args[:1])) is not None:
            recorded.read.append(ids)
        if feeds_back:
            recorded.codes.append(output[CODES])

    with watch([Hook(output_embedding(model), after=after), Hook(model, after=called)]):
        yield recorded


def _states(
    model: PreTrainedModel, ids: Tensor, steps: int, recorded: Recorded | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return z [steps, d], W z + b [steps, V] and codes [steps], recorded or of a forward pass."""
    if recorded is not None and recorded.is_of(ids[:, :steps]):
        codes = torch.cat(recorded.codes, 1)[0, :steps] if recorded.codes else None
        z, embedded = (torch.cat(one, 1)[0, :steps] for one in (recorded.states, recorded.embedded))
        return z, embedded, codes
    with capture(model) as seen:
        # Codes of a pass each where it kept fewer states than it read.
        known = recorded.codes if recorded is not None else []
        known = known if sum(one.shape[1] for one in known) == steps else []
        output = model(**replay(ids, known), use_cache=False)
    assert seen.embedded is not None
    codes = output[CODES][0, :steps] if uncertainty_of(model) is not None else None
    return seen.z[0, :steps], seen.embedded[0, :steps], codes


@torch.no_grad()
def split_predictions(
    model: PreTrainedModel,
    head: PrototypeHead,
    output: OutputLayer,
    ids: Tensor,
    steps: int,
    recorded: Recorded | Kept | None = None,
) -> Predictions:
    """Split the first ``steps`` predictions along ``ids`` [1, T].

    The target of prediction t is token t + 1; the last token's target is the model's top token.
    The model runs once, or not at all where its generation of ``ids`` was recorded; of what was
    ``Kept``, sums are checked for the written tokens.

    Raises:
        DecompositionError: the parts of a logit do not sum to the model's own.
    """
    if isinstance(recorded, Kept):
        z, own = recorded
        return _split(output, head, z, ids[0, :-1], ids[0, 1:], own).cpu()
    states, embedded, codes = _states(model, ids, steps, recorded)
    top = output.logit_map(embedded[-1:].float()).argmax(-1)
    targets = torch.cat([ids[0, 1:], top])[:steps]
    split = split_states(output, head, states, embedded, ids[0, :steps], targets).cpu()
    if codes is None:
        return split
    return replace(split, fed_back=fed_back(model, codes), codes=codes[None])


def fed_back(model: PreTrainedModel, codes: Tensor | None) -> FedBack | None:
    """Return codes as shares of the largest entropy, and codes; None where there is no code."""
    feedback = uncertainty_of(model)
    if feedback is None or codes is None:
        return None
    most = feedback.embedding.levels - 1
    return [(None, None) if code == NO_CODE else (code / most, code) for code in codes.tolist()]
