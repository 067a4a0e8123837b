"""What the prototype head is trained to minimise, on one forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import check_number
from prismlm.models.seam import LogitMap
from prismlm.ops.tiles import at_once

NO_LABEL = -100
# Logits whose divergence is formed at a time, on a CPU.
TILE_ELEMENTS = 2**16


@dataclass(frozen=True)
class LossWeights:
    """How much each loss of the head counts beside the cross-entropy.

    Attributes:
        prototype_pull: weight of R1, every prototype to its nearest state.
        point_pull: weight of R2, every state to its nearest prototype.
        residual: weight of RES, ‖z − ẑ‖².
        diversity: weight of DIV, the mean squared cosine between prototypes.
        prototype_only_ce: weight of the cross-entropy of the logits that ẑ alone gives.
        prototype_only_kl: weight of KL(model ‖ ẑ alone), the same without the labels' noise.
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
    """What turns a state into logits: ℓ = logit_map(W z + b)."""

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, " V"] | None
    logit_map: LogitMap

    def __call__(self, z: Float[Tensor, "N d"]) -> Float[Tensor, "N V"]:
        """Return the logits that softmax sees, as precise as the model's own."""
        return self.logit_map(F.linear(z.to(self.weight.dtype), self.weight, self.bias))

    def of_tokens(self, tokens: Int64[Tensor, " S"]) -> OutputMap:
        """Return the map to the logits of some tokens."""
        bias = None if self.bias is None else self.bias[tokens]
        return OutputMap(self.weight.index_select(0, tokens), bias, self.logit_map)


class VocabularySample:
    """The part of a vocabulary that one step compares two predictions over.

        KL(p ‖ q) over F ∪ D,   p and q being softmaxes in which a token of D counts (V − |F|) / |D|

    F are the tokens most frequent in the corpus, in every step; D are drawn from the others for
    each step. A drawn token stands for those that were not, so the sums that normalise p and q are
    estimated without bias; over the whole vocabulary it is the plain divergence.

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
        """Let tokens be drawn on a device; return the sample itself."""
        self.frequent, self.rare = self.frequent.to(device), self.rare.to(device)
        return self

    def draw(self, seed: int) -> tuple[Int64[Tensor, " S"], Float[Tensor, " S"]]:
        """Return the tokens of a step and the logarithm of what each counts."""
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


def following(labels: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
    """Return at each position the label of the next, which decoders predict from it."""
    return F.pad(labels[:, 1:], (0, 1), value=NO_LABEL)


def prototype_only_losses(
    z: Float[Tensor, "N d"],
    reconstruction: Float[Tensor, "N d"],
    labels: Int64[Tensor, " N"] | None,
    mask: Bool[Tensor, " N"] | None,
    output_map: OutputMap,
    weights: LossWeights,
    sample: tuple[Int64[Tensor, " S"], Float[Tensor, " S"]] | None = None,
) -> dict[str, Tensor]:
    """Return how well ẑ alone predicts, in nats per predicted token.

        prototype_only_ce = −mean log q(next token),   q = softmax(logit_map(W ẑ + b))
        prototype_only_kl = mean Σ_v p_v log(p_v / q_v),   p = softmax of the model's own logits

    Both are averaged over the positions that have a label, or over all that are not padding.
    p is a target: the model's own logits get no gradient from it.

    Args:
        z: hidden states.
        reconstruction: ẑ.
        labels: the token that follows each state; −100 where none is to be predicted.
        mask: false on padding.
        output_map: from states to logits.
        weights: a loss of weight 0 is left out.
        sample: of :meth:`VocabularySample.draw`, that the KL is taken over; None: all tokens.
    """
    counted = mask if labels is None else labels != NO_LABEL
    losses: dict[str, Tensor] = {}
    if weights.prototype_only_ce and labels is not None:
        logits = output_map(reconstruction).float()
        ce = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")
        losses["prototype_only_ce"] = _mean(ce, counted)
    if weights.prototype_only_kl:
        if sample is None:
            target, logits, counts = output_map(z), output_map(reconstruction), None
        else:
            tokens, counts = sample
            some = output_map.of_tokens(tokens)
            target, logits = some(z), some(reconstruction)
        kl = divergence(target.detach(), logits, counts)
        losses["prototype_only_kl"] = _mean(kl, counted)
    return losses


def _mean(values: Tensor, counted: Tensor | None) -> Tensor:
    if counted is None:
        return values.mean()
    return (values * counted).sum() / counted.sum().clamp_min(1)


def divergence(
    target: Float[Tensor, "N V"],
    logits: Float[Tensor, "N V"],
    log_counts: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, " N"]:
    """Return KL(p ‖ q) per row, p = softmax(target), q = softmax(logits), in nats.

        KL = Σ_v p_v (target_v − logits_v) − lse(target) + lse(logits)        ∂KL/∂logits = q − p

    ``target`` gets no gradient. Maths is in float32 or better; one [N, V] tensor, q − p in the
    dtype of the logits, is kept for the backward pass, where autograd through two log-softmaxes
    keeps four.

    Args:
        target: logits of the prediction to come close to.
        logits: of the prediction that is measured.
        log_counts: added to both, the logarithm of how many tokens each stands for.
    """
    return cast(
        "Tensor",
        _Divergence.apply(target.detach(), logits, log_counts),  # pyright: ignore[reportUnknownMemberType]
    )


class _Divergence(torch.autograd.Function):
    """Forms the gradient in the forward pass, while p and q are at hand."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, logits: Tensor, log_counts: Tensor | None) -> Tensor:
        n, vocabulary = logits.shape
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        found = torch.empty(n, dtype=dtype, device=logits.device)
        difference = torch.empty_like(logits)
        rows = max(1, at_once(logits, TILE_ELEMENTS) // max(1, vocabulary))
        for start in range(0, n, rows):
            tile = slice(start, start + rows)
            ours, theirs = logits[tile].to(dtype), target[tile].to(dtype)
            if log_counts is not None:
                ours, theirs = ours + log_counts, theirs + log_counts
            q, p = ours.softmax(-1), theirs.softmax(-1)
            # The largest probability gives the log of the sum without another exponential.
            normaliser = ours.amax(-1) - q.amax(-1).log() - theirs.amax(-1) + p.amax(-1).log()
            found[tile] = ((theirs - ours) * p).sum(-1) + normaliser
            difference[tile] = q.sub_(p)
        ctx.save_for_backward(difference)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        """Return (q − p) times the gradient of each row."""
        (difference,) = ctx.saved_tensors
        return None, difference * grads[0][:, None].to(difference.dtype), None
