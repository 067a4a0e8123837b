"""How well a prototype head stands in for a model's hidden states, on held-out text.

z is the state that enters the output embedding, ẑ its reconstruction from prototypes, r = z − ẑ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prismlm.corpus.windows import WindowBatch
from prismlm.explain.prediction import OutputLayer
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture
from prismlm.models.watch import evaluating


@dataclass(frozen=True)
class HeadQuality:
    """Metrics of a head over held-out predictions; their names are keys in files."""

    tokens: int  # number of predictions
    ce: float  # cross-entropy of the model itself, in nats per token
    prototype_only_ce: float  # cross-entropy with ẑ in place of z, in nats per token
    # Median of Σ e_i / (Σ e_i + e_residual + e_bias) for the model's top token, with evidence e.
    explained_share: float
    fvu: float  # fraction of variance unexplained, Σ‖r‖² / Σ‖z − mean z‖²
    agreement: float  # share of predictions with the same top token from ẑ as from z
    in_use: float  # share of prototypes with a positive activation for at least one prediction
    usage_perplexity: float  # exp of the entropy of uses over prototypes; at most K
    # Cross-entropy with the mean of all z in place of every z; None in old files.
    mean_state_ce: float | None = None

    @property
    def recovered(self) -> float | None:
        """(mean-state CE − prototype-only CE) / (mean-state CE − CE): 1 if ẑ is as good as z."""
        if self.mean_state_ce is None or self.mean_state_ce <= self.ce:
            return None
        return (self.mean_state_ce - self.prototype_only_ce) / (self.mean_state_ce - self.ce)

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics by name, without ``recovered``, which follows from them."""
        return asdict(self)


@torch.no_grad()
def quality_of(
    output: OutputLayer, head: PrototypeHead, batches: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> HeadQuality:
    """Measure a head on float32 states z [N, d], the model's logits [N, V], next tokens [N]."""
    sizes = head.num_prototypes, head.width, len(output.weight)
    usage, total, counts = (torch.zeros(n, dtype=torch.float64) for n in sizes)
    sums, explained = defaultdict[str, float](float), list[Tensor]()
    for z, logits, targets in batches:
        routing, rebuilt = head(z)
        ce, top = _loss(logits, targets)
        # These logits are free again before the next pass, which has its own.
        prototype_only_ce, prototype_top = _loss(output.logits(rebuilt), targets)
        for name, amount in (
            ("ce", ce),
            ("prototype_only_ce", prototype_only_ce),
            ("agreement", (prototype_top == top).sum()),
            ("residual", (z - rebuilt).double().square().sum()),
            ("squared_z", z.double().square().sum()),
        ):
            sums[name] += amount.item()
        total += z.double().sum(0).cpu()
        counts += torch.bincount(targets, minlength=len(counts)).cpu()
        used = routing.indices[routing.activations > 0]
        usage += torch.bincount(used, minlength=len(usage)).cpu()
        explained.append(output.parts(head.prototypes, z, routing, top).explained_share.cpu())
    shares = torch.cat(explained)
    count = len(shares)
    # The mean state gives every position the same log-probabilities: counts of targets suffice.
    mean = (total / count).to(output.weight.device, torch.float32)
    log_probabilities = output.logits(mean[None])[0].log_softmax(-1).double().cpu()
    variance = sums["squared_z"] - (total.square().sum() / count).item()
    shares_of_use = usage[usage > 0] / usage.sum()
    return HeadQuality(
        tokens=count,
        **{name: sums[name] / count for name in ("ce", "prototype_only_ce", "agreement")},
        explained_share=shares.median().item(),
        fvu=sums["residual"] / max(variance, 1e-30),
        in_use=(usage > 0).double().mean().item(),
        usage_perplexity=torch.exp(torch.special.entr(shares_of_use).sum()).item(),
        mean_state_ce=-(counts @ log_probabilities).item() / count,
    )


def _loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of cross-entropies, and the top tokens."""
    return F.cross_entropy(logits, targets, reduction="sum"), logits.argmax(-1)


def measure_quality(
    model: nn.Module, head: PrototypeHead, logit_map: LogitMap, batches: Iterable[WindowBatch]
) -> HeadQuality:
    """Measure a head on the predictions that window batches own; one forward pass each."""
    output = OutputLayer.from_model(model, logit_map)

    def passes() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for batch in batches:
            ids, attended, scored = batch.scored_on(output.weight.device)
            if not scored.any():
                continue
            with capture(model) as seen:
                model(input_ids=ids, attention_mask=attended, use_cache=False)
            assert seen.embedded is not None
            logits = logit_map(seen.embedded[:, :-1][scored].float())
            yield seen.z[:, :-1][scored].float(), logits, ids[:, 1:][scored]

    with evaluating(model):
        return quality_of(output, head, passes())
