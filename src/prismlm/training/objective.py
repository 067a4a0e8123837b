"""What the prototype head is trained for: its losses on the states of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import InputError, check_number
from prismlm.models.seam import LogitMap
from prismlm.ops.divergence import divergence

NO_LABEL = -100


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
    residual: float = 0.1
    diversity: float = 0.0
    prototype_only_ce: float = 0.0
    prototype_only_kl: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            weight, wanted = getattr(self, field.name), "0 or a positive number"
            check_number(f"the weight of {field.name}", weight, wanted, lambda x: x >= 0)


class States(NamedTuple):
    """Hidden states the head is trained on, with what the model made of them.

    Attributes:
        z: [N, d].
        mask: false on padding.
        labels: the token that follows each state; −100 where none is to be predicted.
        embedded: W z + b as the model formed it, [N, V]; None where no loss needs it.
    """

    z: Float[Tensor, "N d"]
    mask: Bool[Tensor, " N"] | None
    labels: Int64[Tensor, " N"] | None
    embedded: Float[Tensor, "N V"] | None


class OutputMap(NamedTuple):
    """What turns a state into logits: ℓ = logit_map(W z + b)."""

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, " V"] | None
    logit_map: LogitMap

    def __call__(self, z: Float[Tensor, "N d"]) -> Float[Tensor, "N V"]:
        """Return the logits that softmax sees, as precise as the model's own."""
        return self.logit_map(F.linear(z.to(self.weight.dtype), self.weight, self.bias))


def sample_positions(length: int, share: float, step: int, device: torch.device) -> Tensor:
    """Return every s-th position of a row, s = round(1 / share), starting one later each step.

    The choice depends on the step alone: a resumed run makes it again, and so does every split
    of the step into processes and micro-batches.
    """
    stride = max(1, min(length, round(1 / share)))
    return torch.arange(step % stride, length, stride, device=device)


def following(labels: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
    """Return at each position the label of the next, which decoders predict from it."""
    return F.pad(labels[:, 1:], (0, 1), value=NO_LABEL)


def select(
    z: Float[Tensor, "B T d"],
    embedded: Float[Tensor, "B T V"] | None,
    mask: Bool[Tensor, "B T"] | None,
    labels: Int64[Tensor, "B T"] | None,
    positions: Int64[Tensor, " S"] | None,
) -> States:
    """Flatten rows to states, at all positions or at the given ones; labels move one ahead."""
    if labels is not None:
        labels = following(labels)

    def flat(tensor: Tensor) -> Tensor:
        return (tensor if positions is None else tensor[:, positions]).flatten(0, 1)

    return States(
        flat(z),
        None if mask is None else flat(mask),
        None if labels is None else flat(labels),
        None if embedded is None else flat(embedded),
    )


def prototype_only_losses(
    reconstruction: Float[Tensor, "N d"],
    states: States,
    output_map: OutputMap,
    weights: LossWeights,
) -> dict[str, Tensor]:
    """Return how well ẑ alone predicts, in nats per predicted token.

        prototype_only_ce = −mean log q(next token),   q = softmax(logit_map(W ẑ + b))
        prototype_only_kl = mean Σ_v p_v log(p_v / q_v),   p = softmax of the model's own logits

    Both are averaged over the positions that have a label, or over all that are not padding.
    p is a target: the model's own logits get no gradient from it.

    Raises:
        InputError: the KL has a weight and the states come without ``embedded``.
    """
    kept = states.mask
    if states.labels is not None:
        kept = states.labels != NO_LABEL
    logits = output_map(reconstruction)
    losses: dict[str, Tensor] = {}
    if weights.prototype_only_ce and states.labels is not None:
        ce = F.cross_entropy(logits.float(), states.labels, ignore_index=NO_LABEL, reduction="none")
        losses["prototype_only_ce"] = _mean(ce, kept)
    if weights.prototype_only_kl:
        if states.embedded is None:
            raise InputError("prototype_only_kl needs what the model's output embedding gave.")
        target = output_map.logit_map(states.embedded.detach())
        losses["prototype_only_kl"] = _mean(divergence(target, logits), kept)
    return losses


def _mean(values: Tensor, kept: Tensor | None) -> Tensor:
    if kept is None:
        return values.mean()
    return (values * kept).sum() / kept.sum().clamp_min(1)
