"""Which experts a token goes to, and what each of them counts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError


class ExpertChoice(NamedTuple):
    """Which experts tokens go to.

    Attributes:
        experts: the k experts of each token, the likeliest first; ties to the lower number.
        weights: what each of them counts, float32 or wider.
    """

    experts: Int64[Tensor, "N k"]
    weights: Float[Tensor, "N k"]


def check_numbers(experts: int, chosen: int) -> None:
    """Raise InputError unless 1 ≤ k ≤ E."""
    if experts < 1:
        raise InputError(f"a mixture of {experts} experts: expected at least 1.")
    if not 1 <= chosen <= experts:
        raise InputError(
            f"{chosen} experts per token of a mixture of {experts}: expected 1 to {experts}."
        )


def probabilities(router_logits: Float[Tensor, "*batch E"]) -> Float[Tensor, "*batch E"]:
    """Return softmax over the experts, in float32 at least."""
    dtype = torch.promote_types(router_logits.dtype, torch.float32)
    return router_logits.softmax(-1, dtype=dtype)


def choose(router_logits: Float[Tensor, "N E"], chosen: int) -> ExpertChoice:
    """Return the k likeliest experts of each token, and their weights.

        p = softmax(router_logits)
        w_e = p_e / Σ_{e' chosen} p_e' for k > 1,   w_e = p_e for k = 1

    A single weight divided by itself would be 1, and the router would have no gradient from what
    its choice leads to.

    Source: Jiang et al., Mixtral of Experts (2024), for k > 1; Fedus et al., Switch Transformers
    (JMLR 2022), for k = 1.

    Args:
        router_logits: of each token and expert.
        chosen: k.

    Raises:
        InputError: k is not 1 to E, or there is no expert.
    """
    check_numbers(router_logits.shape[-1], chosen)
    p, order = torch.sort(probabilities(router_logits), stable=True, dim=-1, descending=True)
    weights = p[:, :chosen]
    if chosen > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return ExpertChoice(order[:, :chosen], weights)
