"""How much of a model's prediction its prototypes carry, on text it was not trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.explain.split import OutputLayer
from prismlm.layers import PrototypeHead
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import LogitMap, capture

if TYPE_CHECKING:
    from prismlm.corpus.windows import WindowBatch


@dataclass(frozen=True)
class HeadQuality:
    """Figures of a head over held-out predictions.

    Attributes:
        tokens: predictions measured.
        ce: cross-entropy of the model itself, in nats per token.
        prototype_only_ce: cross-entropy when ẑ takes the place of z before the output embedding.
        explained_share: median over predictions of Σ e_i / (Σ e_i + e_residual + e_bias) for the
            model's top token, where e is evidence.
        fvu: fraction of variance unexplained, Σ‖r‖² / Σ‖z − mean z‖².
        agreement: share of predictions whose top token is the same from ẑ alone.
        in_use: share of prototypes routed with positive activation at least once.
        usage_perplexity: exp of the entropy of how uses spread over prototypes; K at most.
        mean_state_ce: cross-entropy when the mean of all z takes the place of z everywhere: what is
            left when nothing is known of a state. None where it was not measured.
    """

    tokens: int
    ce: float
    prototype_only_ce: float
    explained_share: float
    fvu: float
    agreement: float
    in_use: float
    usage_perplexity: float
    mean_state_ce: float | None = None

    @property
    def recovered(self) -> float | None:
        """What ẑ alone recovers: (CE of the mean state − prototype-only CE) / (the same − CE)."""
        if self.mean_state_ce is None:
            return None
        return (self.mean_state_ce - self.prototype_only_ce) / (self.mean_state_ce - self.ce)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


@dataclass
class _Sums:
    """Running sums in float64; one pass, whatever the amount of text."""

    usage: Tensor
    mean_z: Tensor
    targets: Tensor
    tokens: int = 0
    ce: float = 0.0
    prototype_only_ce: float = 0.0
    agreeing: int = 0
    residual: float = 0.0
    squared_z: float = 0.0
    shares: list[Tensor] = field(default_factory=list[Tensor])


@torch.no_grad()
def measure_quality(
    model: nn.Module,
    head: PrototypeHead,
    logit_map: LogitMap,
    batches: Iterable[WindowBatch],
) -> HeadQuality:
    """Measure a head on window batches; one forward pass each, in evaluation mode.

    A prediction counts if its position is owned by its window and its target lies in the window.

    Raises:
        InputError: no prediction to measure.
    """
    output = OutputLayer.of(model, logit_map)
    sums = _empty(output, head)
    with evaluating(model):
        for batch in batches:
            _add_batch(sums, model, head, output, batch)
    if sums.tokens == 0:
        raise InputError(
            "there is no held-out text to measure on: build the corpus with more documents or a "
            "larger --heldout share."
        )
    return _finish(sums, output)


@torch.no_grad()
def measure_states(
    model: nn.Module, head: PrototypeHead, states: Iterable[tuple[Tensor, Tensor]]
) -> HeadQuality:
    """Measure a head on hidden states that are known, [N, d], each with the token that follows.

    The model is not run: its logits are those of its output embedding.
    """
    output = OutputLayer.of(model, LogitMap.of(model))
    sums = _empty(output, head)
    for z, targets in states:
        z, targets = z.to(output.weight.device).float(), targets.to(output.weight.device)
        _add_states(sums, head, output, z, output.logits(z), targets)
    return _finish(sums, output)


def _empty(output: OutputLayer, head: PrototypeHead) -> _Sums:
    usage, mean, targets = (
        torch.zeros(size, dtype=torch.float64)
        for size in (head.num_prototypes, head.width, len(output.weight))
    )
    return _Sums(usage, mean, targets)


def _add_batch(
    sums: _Sums, model: nn.Module, head: PrototypeHead, output: OutputLayer, batch: WindowBatch
) -> None:
    device = output.weight.device
    ids, attended = batch.input_ids.to(device), batch.attention_mask.to(device)
    scored = batch.owned.to(device)[:, :-1] & attended[:, 1:]
    if not scored.any():
        return
    with capture(model) as seen:
        model(input_ids=ids, attention_mask=attended.long(), use_cache=False)
    z = seen.z[:, :-1][scored].float()
    assert seen.embedded is not None
    logits = output.logit_map(seen.embedded[:, :-1][scored].float())
    _add_states(sums, head, output, z, logits, ids[:, 1:][scored])


def _add_states(
    sums: _Sums,
    head: PrototypeHead,
    output: OutputLayer,
    z: Tensor,
    logits: Tensor,
    targets: Tensor,
) -> None:
    routing, rebuilt = head(z)
    from_prototypes = output.logits(rebuilt)
    top = logits.argmax(-1)
    parts = output.parts(head, z, routing, top)
    sums.tokens += len(z)
    sums.ce += F.cross_entropy(logits, targets, reduction="sum").item()
    sums.prototype_only_ce += F.cross_entropy(from_prototypes, targets, reduction="sum").item()
    sums.agreeing += int((from_prototypes.argmax(-1) == top).sum())
    sums.residual += (z - rebuilt).double().square().sum().item()
    sums.squared_z += z.double().square().sum().item()
    sums.mean_z += z.double().sum(0).cpu()
    sums.targets += torch.bincount(targets, minlength=len(sums.targets)).cpu()
    used = routing.indices[routing.activations > 0]
    sums.usage += torch.bincount(used, minlength=head.num_prototypes).cpu()
    sums.shares.append(parts.explained_share.cpu())


def _finish(sums: _Sums, output: OutputLayer) -> HeadQuality:
    count = sums.tokens
    mean = (sums.mean_z / count).to(output.weight.device, torch.float32)
    of_mean = output.logits(mean[None])[0].log_softmax(-1).double().cpu()
    variance = sums.squared_z - (sums.mean_z.square().sum() / count).item()
    spread = sums.usage[sums.usage > 0] / sums.usage.sum().clamp_min(1)
    return HeadQuality(
        tokens=count,
        ce=sums.ce / count,
        prototype_only_ce=sums.prototype_only_ce / count,
        explained_share=torch.cat(sums.shares).median().item(),
        fvu=sums.residual / max(variance, 1e-30),
        agreement=sums.agreeing / count,
        in_use=(sums.usage > 0).double().mean().item(),
        usage_perplexity=torch.exp(-(spread * spread.log()).sum()).item(),
        mean_state_ce=-(sums.targets @ of_mean).item() / count,
    )
