"""The auxiliary loss that keeps experts in use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.ops.experts.choice import choose, probabilities


def load_balancing_loss(
    router_logits: Sequence[Float[Tensor, "N E"]],
    chosen: int,
    mask: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, ""]:
    """Return the load-balancing loss of a model's routers, as Hugging Face's models do.

        E Σ_e f_e P_e,   f_e = mean of [e is among the k of a token],   P_e = mean of p_e

    Means run over the tokens of all layers together, E and k being the same in each: what is
    pressed for is that an expert's number is used evenly through the model, not layer by layer.
    It is k where f or P is even and E·p̄ where every token goes to the same experts, with p̄ their
    summed probability; the gradient comes through P. Without a token it is 0.

    Source: Fedus et al., Switch Transformers (JMLR 2022), Eq. 4 to 6.

    Args:
        router_logits: of each layer.
        chosen: k.
        mask: false on padding, which does not count.

    Raises:
        InputError: no layer, layers of other shapes, a mask of another length, or k not 1 to E.
    """
    shapes = {tuple(logits.shape) for logits in router_logits}
    if len(shapes) != 1:
        raise InputError(
            f"router logits are {sorted(shapes)}: expected those of one layer or more, [N, E] each."
        )
    logits = torch.stack(list(router_logits))
    count = logits.shape[-1]
    if mask is not None and mask.shape != logits.shape[1:2]:
        raise InputError(f"the mask is {list(mask.shape)}: expected {list(logits.shape[1:2])}.")
    used = F.one_hot(choose(logits.flatten(0, 1), chosen).experts, count).sum(1)
    p = probabilities(logits).flatten(0, 1)
    kept = p.new_ones(len(p)) if mask is None else mask.to(p.dtype).repeat(len(logits))
    total = kept.sum().clamp_min(1)
    return count * torch.dot(kept @ used.to(p.dtype), kept @ p) / total.square()
