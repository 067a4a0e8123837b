"""Mixtures of experts as their equations, one token and one expert at a time; for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prismlm.ops.experts.grouped import ExpertChoice, check_numbers


def choose(router_logits: Float[Tensor, "N E"], chosen: int) -> ExpertChoice:
    """Return each token's experts and their weights; same contract as :func:`grouped.choose`."""
    check_numbers(router_logits.shape[-1], chosen)
    rows: list[list[int]] = []
    weights: list[Tensor] = []
    for logits in router_logits:
        p = logits.exp() / logits.exp().sum()
        # Sorting is stable, so the lower number comes first of two alike.
        best = sorted(range(len(p)), key=lambda e: -float(p[e].detach()))[:chosen]
        rows.append(best)
        weights.append(p[best] / (p[best].sum() if chosen > 1 else 1))
    return ExpertChoice(torch.tensor(rows), torch.stack(weights))


def mix(
    x: Float[Tensor, "N d"], choice: ExpertChoice, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Float[Tensor, "N d"]:
    """Return Σ_j w_nj · expert_{e_nj}(x_n); same contract as :func:`grouped.mix`."""
    rows: list[Tensor] = []
    for n in range(len(x)):
        total = torch.zeros_like(x[n])
        for e, weight in zip(choice.experts[n], choice.weights[n], strict=True):
            total = total + weight * experts[int(e)](x[n : n + 1])[0]
        rows.append(total)
    return torch.stack(rows)


def load_balancing_loss(
    router_logits: Sequence[Float[Tensor, "N E"]],
    chosen: int,
    mask: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, ""]:
    """Return E Σ_e f_e P_e; same contract as :func:`grouped.load_balancing_loss`."""
    used = likely = torch.zeros_like(router_logits[0][0])
    tokens = 0
    for layer in router_logits:
        for n, logits in enumerate(layer):
            if mask is None or bool(mask[n]):
                best = choose(layer, chosen).experts[n]
                used = used + torch.zeros_like(used).index_fill(0, best, 1.0)
                likely = likely + logits.exp() / logits.exp().sum()
                tokens += 1
    number = max(tokens, 1)
    return len(used) * ((used / number) * (likely / number)).sum()
