"""Sums over queries from which the figures of a layer's heads follow, batch by batch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.models.attention import check_finite


class AttentionTally:
    """What the heads of one layer did, summed over queries; float64, on the CPU.

    Attributes:
        queries: how many query positions were added.
        profile: attention by distance, [H, T] for the longest T so far: Σ over queries i of
            a(i, i − δ).
        entropy: Σ of −Σ_j a_ij ln a_ij, nats [H].
        relative_entropy: Σ of entropy / ln n_i for n_i visible positions [H].
        first: Σ of a on the window's first token [H].
    """

    def __init__(self, heads: int) -> None:
        self.queries = 0
        self.profile = torch.zeros(heads, 0, dtype=torch.float64)
        self.entropy = torch.zeros(heads, dtype=torch.float64)
        self.relative_entropy = torch.zeros(heads, dtype=torch.float64)
        self.first = torch.zeros(heads, dtype=torch.float64)

    def add(
        self,
        weights: Float[Tensor, "B H T T"],
        chosen: Bool[Tensor, "B T"],
        visible: Int64[Tensor, "B T"],
    ) -> None:
        """Take the queries ``chosen``, which see ``visible`` positions each, themselves among them.

        Windows may have padding before or behind, not within.

        Raises:
            InputError: a weight that is not finite.
        """
        queries = [row.nonzero()[:, 0] for row in chosen]
        self.queries += sum(map(len, queries))
        length = weights.shape[-1]
        longest = max(length, self.profile.shape[1])
        self.profile = F.pad(self.profile, (0, longest - self.profile.shape[1]))
        # One head at a time: what is made of its weights is larger than they are.
        for head in range(weights.shape[1]):
            self._add_head(head, weights[:, head], queries, visible)

    def _add_head(
        self,
        head: int,
        weights: Float[Tensor, "B T T"],
        queries: list[Tensor],
        visible: Int64[Tensor, "B T"],
    ) -> None:
        summed = torch.zeros(weights.shape[1:], dtype=torch.float64, device=weights.device)
        dtype = torch.promote_types(weights.dtype, torch.float32)
        for row, own in enumerate(queries):
            if not len(own):
                continue
            # What padding attends to is no matter, finite or not.
            attention = weights[row, own].to(dtype)
            summed[own] += attention
            entropy = torch.special.entr(attention).sum(-1, dtype=torch.float64)
            seen = visible[row, own]
            self.entropy[head] += entropy.sum().cpu()
            self.relative_entropy[head] += (entropy / seen.double().log()).sum().cpu()
            start = int(own[0] - seen[0] + 1)
            self.first[head] += attention[:, start].sum(dtype=torch.float64).cpu()
        profile = _diagonals(summed).cpu()
        check_finite(profile)
        self.profile[head, : len(profile)] += profile


def _diagonals(summed: Float[Tensor, "T T"]) -> Float[Tensor, " T"]:
    """Return the sums over i of the elements (i, i − δ) for δ = 0 … T − 1."""
    length = len(summed)
    # With T zeros after each mirrored row and rows read 2T − 1 wide, row i shifts by i, so that
    # the column of an element is T − 1 + δ.
    wide = F.pad(summed.flip(-1), (0, length)).flatten()[:-length]
    return wide.view(length, 2 * length - 1).sum(0)[length - 1 :]
