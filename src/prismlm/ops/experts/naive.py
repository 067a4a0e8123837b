"""Mixtures of experts as their equations, one token and one expert at a time; for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.ops.experts.grouped import ExpertChoice, check_numbers


def choose(router_logits: Float[Tensor, "N E"], chosen: int) -> ExpertChoice:
    """Return each token's experts and their weights; same contract as :func:`grouped.choose`."""
    check_numbers(router_logits.shape[-1], chosen)
    indices: list[list[int]] = []
    weights: list[Tensor] = []
    for logits in router_logits:
        p = logits.exp() / logits.exp().sum()
        # Sorting is stable: of equal experts the lower index comes first.
        best = sorted(range(len(p)), key=lambda e: -float(p[e].detach()))[:chosen]
        indices.append(best)
        weights.append(p[best] / (p[best].sum() if chosen > 1 else 1))
    return ExpertChoice(torch.tensor(indices), torch.stack(weights))


def mix(
    x: Float[Tensor, "N d"], choice: ExpertChoice, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Float[Tensor, "N d"]:
    """Return Σ_j w_nj · expert_{e_nj}(x_n); same contract as :func:`grouped.mix`."""
    sums: list[Tensor] = []
    for n in range(len(x)):
        total = torch.zeros_like(x[n])
        for e, weight in zip(choice.experts[n], choice.weights[n], strict=True):
            total = total + weight * experts[int(e)](x[n : n + 1])[0]
        sums.append(total)
    return torch.stack(sums)
