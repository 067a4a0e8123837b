"""Splitting a logit into prototypes, residual and bias (PRISM, "Faithful Logit decomposition")."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class Parts(NamedTuple):
    """The logit of one target token per state, split; N states, k prototypes each.

    Contributions, residual and bias sum to the logit; the evidence of all parts sums to the logit
    minus its mean over the vocabulary.
    """

    contributions: Float[Tensor, "N k"]
    evidence: Float[Tensor, "N k"]
    residual: Float[Tensor, " N"]
    residual_evidence: Float[Tensor, " N"]
    bias: Float[Tensor, " N"]
    bias_evidence: Float[Tensor, " N"]

    @property
    def logit(self) -> Float[Tensor, " N"]:
        """The sum of all parts, before any soft-cap."""
        return self.contributions.sum(-1) + self.residual + self.bias

    @property
    def explained_share(self) -> Float[Tensor, " N"]:
        """Σ e_i / (Σ e_i + e_residual + e_bias), in terms of evidence."""
        explained = self.evidence.sum(-1)
        return explained / (explained + self.residual_evidence + self.bias_evidence)


def decompose(
    z: Float[Tensor, "N d"],
    indices: Int64[Tensor, "N k"],
    activations: Float[Tensor, "N k"],
    prototypes: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    targets: Int64[Tensor, " N"],
    *,
    scale: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    weight_mean: Float[Tensor, " d"] | None = None,
) -> Parts:
    """Split scale · W z + bias at each state's target token v.

    contribution_i = scale · α_i (W p_i)[v] and residual = scale · (W r)[v] with r = z − Σ α_i p_i
    taken as a vector. Evidence subtracts each part's mean over the vocabulary, to which a softmax
    is blind: e_i = scale · α_i (W_v − W̄)·p_i.

    Args:
        z: the input of the output embedding, in float32 or better.
        indices: routed prototypes.
        activations: their activations α.
        prototypes: the bank P.
        weight: the output embedding W.
        targets: token v per state.
        scale: the model's own factor on W z (1 for most families).
        bias: the output embedding's bias.
        weight_mean: W̄, the mean row of W, if it is at hand.
    """
    # Over one dimension, index_select gathers several times as fast as indexing does; and sums of
    # products are quicker than batches of small matrix products.
    chosen = prototypes.index_select(0, indices.flatten()).view(*indices.shape, -1)
    mean = weight.mean(0) if weight_mean is None else weight_mean
    rows = weight[targets]
    centred = rows - mean
    weighted = scale * activations
    residual = z - torch.einsum("nk,nkd->nd", activations, chosen)
    none = z.new_zeros(z.shape[0])
    return Parts(
        weighted * (chosen * rows[:, None]).sum(-1),
        weighted * (chosen * centred[:, None]).sum(-1),
        scale * (residual * rows).sum(-1),
        scale * (residual * centred).sum(-1),
        none if bias is None else bias[targets],
        none if bias is None else bias[targets] - bias.mean(),
    )
