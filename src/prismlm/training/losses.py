"""Losses of the prediction from prototypes alone, and the weights of all losses of the head.

The other losses, R1, R2, RES and DIV, are those of :meth:`PrototypeHead.losses`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.corpus.packing import IGNORED
from prismlm.errors import check_number
from prismlm.models.seam import LogitMap
from prismlm.ops.tiles import at_once

# Logits whose divergence is computed at a time on a CPU.
TILE_ELEMENTS = 2**16


@dataclass(frozen=True)
class LossWeights:
    """Weights of the head's losses, added to the model's own cross-entropy.

    Attributes:
        prototype_pull: weight of R1, every prototype to its nearest state.
        point_pull: weight of R2, every state to its nearest prototype.
        residual: weight of RES, ‖z − ẑ‖².
        diversity: weight of DIV, the mean squared cosine between prototypes.
        prototype_only_ce: weight of the cross-entropy of the logits of ẑ alone.
        prototype_only_kl: weight of KL(model ‖ ẑ alone), which has no label noise.
    """

    prototype_pull: float = 0.01
    point_pull: float = 0.01
    residual: float = 1.0
    diversity: float = 0.0
    prototype_only_ce: float = 0.0
    prototype_only_kl: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            weight = getattr(self, field.name)
            check_number(f"the weight of {field.name}", weight, "0 or more", lambda x: x >= 0)


class OutputMap(NamedTuple):
    """The map from states to logits: ℓ = logit_map(W z + b)."""

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, " V"] | None
    logit_map: LogitMap

    def __call__(self, z: Float[Tensor, "N d"]) -> Float[Tensor, "N V"]:
        """Return the logits that softmax sees, in the dtype of W, as the model's own are."""
        return self.logit_map(F.linear(z.to(self.weight.dtype), self.weight, self.bias))

    def of_tokens(self, tokens: Int64[Tensor, " S"]) -> OutputMap:
        """Return the map to the logits of these tokens alone."""
        bias = None if self.bias is None else self.bias[tokens]
        return OutputMap(self.weight.index_select(0, tokens), bias, self.logit_map)


class VocabularySample:
    """The tokens over which a step of training estimates KL(p ‖ q).

    F are the tokens most frequent in the corpus, the same in every step; D are drawn from the
    others, with replacement, in each step. In the softmaxes p and q a token of D counts
    (V − |F|) / |D| times, for those that were not drawn: the sums that normalise p and q are then
    estimated without bias. If |D| covers all others, each is taken once, and the KL is exact.

    Args:
        counts: how often each token occurs, int64 [V].
        frequent: |F|.
        drawn: |D|.
    """

    def __init__(self, counts: Int64[Tensor, " V"], frequent: int, drawn: int) -> None:
        order = counts.argsort(descending=True, stable=True)
        self.frequent, self.rare = order[:frequent], order[frequent:]
        self.drawn = min(drawn, len(self.rare))

    def to(self, device: torch.device) -> VocabularySample:
        """Move the tokens to a device, where they are then drawn; return self."""
        self.frequent, self.rare = self.frequent.to(device), self.rare.to(device)
        return self

    def draw(self, seed: int) -> tuple[Int64[Tensor, " S"], Float[Tensor, " S"]]:
        """Return the tokens of a step, and the log of how many times each counts."""
        rare, device = self.rare, self.rare.device
        if self.drawn < len(rare):
            generator = torch.Generator(device).manual_seed(seed)
            chosen = torch.randint(len(rare), (self.drawn,), generator=generator, device=device)
            rare = rare[chosen]
        log_counts = torch.zeros(len(self.frequent) + len(rare), device=device)
        if self.drawn:
            log_counts[len(self.frequent) :] = math.log(len(self.rare) / self.drawn)
        return torch.cat([self.frequent, rare]), log_counts


def sample_positions(length: int, share: float, step: int, device: torch.device) -> Tensor:
    """Return every s-th position of a row, s = round(1 / share), starting one later each step."""
    stride = max(1, min(length, round(1 / share)))
    return torch.arange(step % stride, length, stride, device=device)


def next_labels(labels: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
    """Return at each position the label of the next one, which decoders predict from it."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def prototype_only_losses(
    z: Float[Tensor, "N d"],
    reconstruction: Float[Tensor, "N d"],
    labels: Int64[Tensor, " N"] | None,
    mask: Bool[Tensor, " N"] | None,
    output_map: OutputMap,
    weights: LossWeights,
    sample: tuple[Int64[Tensor, " S"], Float[Tensor, " S"]] | None = None,
) -> dict[str, Tensor]:
    """Return the losses of the prediction from ẑ alone, in nats per token.

        prototype_only_ce = −mean log q(next token),   q = softmax(logit_map(W ẑ + b))
        prototype_only_kl = mean Σ_v p_v log(p_v / q_v),   p = softmax of the model's own logits

    Means are over the positions with a label or, without labels, over all that are not padding.
    p is a target: no gradient reaches the model through it.

    Args:
        z: hidden states.
        reconstruction: ẑ.
        labels: the token after each state, −100 where none is to be predicted; see
            :func:`next_labels`. Without labels there is no prototype_only_ce.
        mask: false on padding.
        output_map: from states to logits.
        weights: a loss of weight 0 is left out.
        sample: from :meth:`VocabularySample.draw`, for the KL alone; None for all tokens.
    """
    included = mask if labels is None else labels != IGNORED
    losses: dict[str, Tensor] = {}
    if weights.prototype_only_ce and labels is not None:
        logits = output_map(reconstruction).float()
        ce = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        losses["prototype_only_ce"] = _mean(ce, included)
    if weights.prototype_only_kl:
        log_counts = None
        if sample is not None:
            tokens, log_counts = sample
            output_map = output_map.of_tokens(tokens)
        kl = divergence(output_map(z), output_map(reconstruction), log_counts)
        losses["prototype_only_kl"] = _mean(kl, included)
    return losses


def _mean(values: Tensor, included: Tensor | None) -> Tensor:
    if included is None:
        return values.mean()
    return (values * included).sum() / included.sum().clamp_min(1)


def divergence(
    target: Float[Tensor, "N V"],
    logits: Float[Tensor, "N V"],
    log_counts: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, " N"]:
    """Return KL(p ‖ q) per row, p = softmax(target), q = softmax(logits), in nats.

        KL = Σ_v p_v (target_v − logits_v) − lse(target) + lse(logits)        ∂KL/∂logits = q − p

    ``target`` gets no gradient. Arithmetic is in float32 or better. One [N, V] tensor, q − p in
    the dtype of the logits, is saved for the backward pass; autograd through two log-softmaxes
    saves four.

    Args:
        target: logits of p, the prediction to match.
        logits: logits of q, the prediction that is trained.
        log_counts: added to both: the log of how many times each token counts.
    """
    return cast(
        "Tensor",
        _Divergence.apply(target.detach(), logits, log_counts),  # pyright: ignore[reportUnknownMemberType]
    )


class _Divergence(torch.autograd.Function):
    """Computes the gradient in the forward pass, which has p and q in memory."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, logits: Tensor, log_counts: Tensor | None) -> Tensor:
        n, vocabulary = logits.shape
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        kl = torch.empty(n, dtype=dtype, device=logits.device)
        difference = torch.empty_like(logits)
        rows = max(1, at_once(logits, TILE_ELEMENTS) // max(1, vocabulary))
        for start in range(0, n, rows):
            tile = slice(start, start + rows)
            q_logits, p_logits = logits[tile].to(dtype), target[tile].to(dtype)
            if log_counts is not None:
                q_logits, p_logits = q_logits + log_counts, p_logits + log_counts
            q, p = q_logits.softmax(-1), p_logits.softmax(-1)
            # lse = max − log(largest probability), without another exponential.
            log_sums = q_logits.amax(-1) - q.amax(-1).log() - p_logits.amax(-1) + p.amax(-1).log()
            kl[tile] = ((p_logits - q_logits) * p).sum(-1) + log_sums
            difference[tile] = q.sub_(p)
        ctx.save_for_backward(difference)
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        """Return (q − p) times the gradient of each row."""
        (difference,) = ctx.saved_tensors
        return None, difference * grads[0][:, None].to(difference.dtype), None
