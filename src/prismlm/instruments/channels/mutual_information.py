"""Mutual information between tokens and activations, from counts that any batches add up to.

    I(T; ã_p) = Σ_{t,b} P(t, b) ln( P(t, b) / (P(t) P(b)) ),   in nats

ã_p is the number of the bin that channel p's activation falls into. The source leaves the bins
open; here each channel has bins that hold equally many activations of a sample. From few positions
the plain figure is too high, since a rare token is seen with few bins whatever it does: the
Miller–Madow correction beside it takes off what chance gives, and can come out below zero. Where
each token always has one bin there is no such excess, and it adds the little that the entropy of
the bins is too low by.
Source: ProtoT, A.8, Eq. 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError


def equal_bins(sample: Float[Tensor, "N P"], bins: int) -> Float[Tensor, "P bins-1"]:
    """Return the edges between bins that hold equally many of each channel's activations.

    Raises:
        InputError: fewer than two bins, or no activations.
    """
    if bins < 2:
        raise InputError(f"{bins} bins: expected at least 2, or there is nothing to tell apart.")
    if sample.ndim != 2 or 0 in sample.shape:
        raise InputError(f"the sample is {list(sample.shape)}: expected [N, P], N and P above 0.")
    ordered = sample.double().sort(0).values
    # The last activation of each bin but the last: an edge belongs to the bin below it.
    places = (torch.arange(1, bins) * len(sample) / bins).ceil().long() - 1
    return ordered[places].T.contiguous()


@dataclass(frozen=True)
class TokenCounts:
    """How often each token came with each bin of each channel.

    Memory: 8·V·P·bins bytes.

    Attributes:
        edges: between bins, ascending, [P, bins − 1].
        counts: int64 [V, P, bins].
    """

    edges: Float[Tensor, "P bins-1"]
    counts: Int64[Tensor, "V P bins"]

    @classmethod
    def empty(cls, edges: Float[Tensor, "P bins-1"], vocabulary: int) -> TokenCounts:
        """Return counts of nothing."""
        channels, inner = edges.shape
        counts = torch.zeros(vocabulary, channels, inner + 1, dtype=torch.int64)
        return cls(edges.double().contiguous(), counts)

    def add(self, tokens: Int64[Tensor, " N"], activations: Float[Tensor, "N P"]) -> None:
        """Count N positions.

        Raises:
            InputError: shapes that do not fit, or a token beyond the vocabulary.
        """
        vocabulary, channels, bins = self.counts.shape
        if activations.shape != (len(tokens), channels):
            raise InputError(
                f"activations are {list(activations.shape)}: expected [{len(tokens)}, {channels}]."
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise InputError(f"a token is not one of the {vocabulary} counted: give all tokens.")
        values = activations.double().T.contiguous()
        found = torch.searchsorted(self.edges, values).T
        cells = (tokens[:, None] * channels + torch.arange(channels)) * bins + found
        self.counts.view(-1).index_add_(
            0, cells.flatten(), torch.ones(cells.numel(), dtype=torch.int64)
        )

    def merge(self, other: TokenCounts) -> None:
        """Add the counts of other positions.

        Raises:
            InputError: other bins or another vocabulary.
        """
        if self.counts.shape != other.counts.shape or not torch.equal(self.edges, other.edges):
            raise InputError("counts over other bins or tokens cannot be added: use one set.")
        self.counts.add_(other.counts)

    def information(self, *, corrected: bool = False) -> Float[Tensor, " P"]:
        """Return I(T; ã_p) of each channel, in nats; float64.

            corrected:  I + (K_T + K_B − K_TB − 1) / 2n,   K: how many values or pairs were seen

        Raises:
            InputError: nothing has been counted.
        """
        total = self.counts[:, 0].sum().item()
        if not total:
            raise InputError("no position has been counted, so there is no mutual information.")
        pairs, tokens, bins = self.counts, self.counts.sum(2), self.counts.sum(0)
        information = _entropy(tokens, 0) + _entropy(bins, 1) - _entropy(pairs, (0, 2))
        if corrected:
            seen = (tokens > 0).sum(0) + (bins > 0).sum(1) - (pairs > 0).sum((0, 2)) - 1
            information = information + seen / (2 * total)
        return information


def _entropy(counts: Tensor, over: int | tuple[int, ...]) -> Tensor:
    shares = counts.double() / counts.sum(over, keepdim=True)
    return -torch.xlogy(shares, shares).sum(over)
