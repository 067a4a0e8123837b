"""A prototype head as an SAE of SAELens; importing this module registers the architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from sae_lens import SAE, SAEConfig, register_sae_class
from sae_lens.saes.sae import SAEMetadata
from torch import Tensor, nn

from prismlm.layers import PrototypeHead
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head.routing import unit_rows

ARCHITECTURE = "prismlm_prototypes"


@dataclass
class PrototypeSAEConfig(SAEConfig):
    """Settings of a head: prototypes per token, τ, and "cosine" or "fitted" weights."""

    k: int = 16
    scale: float = 1.0
    weights: str = "cosine"
    metadata: Any = field(default_factory=SAEMetadata)  # initially a dict

    @classmethod
    def architecture(cls) -> str:
        """Return the registered name."""
        return ARCHITECTURE


class PrototypeSAE(SAE[PrototypeSAEConfig]):
    """The features of a state are the activations α of its k prototypes, as in the head.

        encode(z)_i = α_i of the chosen, else 0        decode(α) = Σ α_i p_i

    ``W_dec`` are the prototypes [K, d]; ``b_dec`` is 0. The error term is the residual r = z − ẑ.
    """

    @classmethod
    def from_head(cls, head: PrototypeHead, **metadata: Any) -> PrototypeSAE:
        """Convert a head; ``metadata`` names the hook of its states."""
        config = PrototypeSAEConfig(
            d_in=head.width,
            d_sae=head.num_prototypes,
            apply_b_dec_to_input=False,
            metadata=SAEMetadata(**metadata),
            k=head.prototypes_per_token,
            scale=float(head.scale.detach()),
            weights=head.weights,
        )
        sae = cls(config)
        with torch.no_grad():
            sae.W_dec.copy_(head.prototypes)
        return sae

    def initialize_weights(self) -> None:
        """Allocate the prototypes."""
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        self.W_dec = nn.Parameter(zeros(self.cfg.d_sae, self.cfg.d_in))
        self.b_dec = nn.Parameter(zeros(self.cfg.d_in))

    @property
    def W_enc(self) -> Tensor:  # pyright: ignore
        """The directions of the cosines, [d, K]."""
        return unit_rows(self.W_dec.detach()).T

    def encode(self, x: Tensor) -> Tensor:
        """Return the activations [..., K] of states [..., d], k of them non-zero."""
        states, k, fitted = self.process_sae_in(x), self.cfg.k, self.cfg.weights == "fitted"
        flat = states.reshape(-1, self.cfg.d_in)
        chosen = ops.nearest(flat, self.W_dec, min(k, ops.PICKS) if fitted else k, self.cfg.scale)
        if fitted:
            chosen = ops.pursue(flat, self.W_dec, k, chosen.indices)
        dense = flat.new_zeros(len(flat), self.cfg.d_sae)
        dense = dense.scatter(1, chosen.indices, chosen.activations.to(dense.dtype))
        dense = self.hook_sae_acts_pre(dense.view(*states.shape[:-1], -1))
        return cast("Tensor", self.hook_sae_acts_post(dense))

    def decode(self, feature_acts: Tensor) -> Tensor:
        """Return Σ α_i p_i."""
        rebuilt = self.hook_sae_recons(feature_acts @ self.W_dec + self.b_dec)
        return self.reshape_fn_out(self.run_time_activation_norm_fn_out(rebuilt), self.d_head)

    def fold_W_dec_norm(self) -> None:
        """Refuse: activations are not linear in the norms of prototypes."""
        raise NotImplementedError("the norms of prototypes cannot be folded into activations.")


register_sae_class(ARCHITECTURE, PrototypeSAE, PrototypeSAEConfig)
