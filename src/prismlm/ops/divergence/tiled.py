"""The divergence of two predictions in tiles of rows that stay in the cache."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.tiles import at_once

TILE_ELEMENTS = 2**17


def divergence(target: Float[Tensor, "N V"], logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """Return KL(p ‖ q) per row, p = softmax(target), q = softmax(logits), in nats.

        KL = Σ_v p_v (target_v − logits_v) − lse(target) + lse(logits)        ∂KL/∂logits = q − p

    ``target`` gets no gradient. Maths is in float32 or better; one [N, V] tensor, q − p in the
    dtype of the logits, is kept for the backward pass, where autograd through two log-softmaxes
    keeps four.

    Args:
        target: logits of the prediction to come close to.
        logits: of the prediction that is measured.

    Raises:
        InputError: shapes that differ.
    """
    if target.shape != logits.shape or logits.ndim != 2:
        raise InputError(
            "divergence expects two tensors [N, V], got "
            f"{list(target.shape)} and {list(logits.shape)}."
        )
    return cast(
        "Tensor",
        _Divergence.apply(target.detach(), logits),  # pyright: ignore[reportUnknownMemberType]
    )


class _Divergence(torch.autograd.Function):
    """Forms the gradient in the forward pass, while p and q are at hand."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, logits: Tensor) -> Tensor:
        n, vocabulary = logits.shape
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        found = torch.empty(n, dtype=dtype, device=logits.device)
        difference = torch.empty_like(logits)
        rows = max(1, at_once(logits, TILE_ELEMENTS) // max(1, vocabulary))
        for start in range(0, n, rows):
            tile = slice(start, start + rows)
            ours, theirs = logits[tile].to(dtype), target[tile].to(dtype)
            q, p = ours.softmax(-1), theirs.softmax(-1)
            # The largest probability gives the log of the sum without another exponential.
            normaliser = ours.amax(-1) - q.amax(-1).log() - theirs.amax(-1) + p.amax(-1).log()
            found[tile] = ((theirs - ours) * p).sum(-1) + normaliser
            difference[tile] = q.sub_(p)
        ctx.save_for_backward(difference)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Return (q − p) times the gradient of each row."""
        (difference,) = ctx.saved_tensors
        return None, difference * grads[0][:, None].to(difference.dtype)
