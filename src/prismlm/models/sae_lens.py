"""A prototype head as a dictionary of SAELens: importing this module registers the architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, get_args

import torch
from sae_lens import SAE, SAEConfig, register_sae_class
from sae_lens.saes.sae import SAEMetadata
from torch import Tensor, nn

from prismlm.layers.prototype_head import PrototypeHead, Weights
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head.routing import unit_rows

ARCHITECTURE = "prismlm_prototypes"


@dataclass
class PrototypeSAEConfig(SAEConfig):
    """What SAELens keeps of a head beside its prototypes.

    Attributes:
        k: prototypes per token.
        scale: τ.
        weights: "cosine" or "fitted", as of the head.
    """

    k: int = 16
    scale: float = 1.0
    weights: str = "cosine"
    metadata: Any = field(default_factory=SAEMetadata)  # which SAELens makes from a dict at first

    @classmethod
    def architecture(cls) -> str:
        """Return the name that SAELens knows the class by."""
        return ARCHITECTURE


class PrototypeSAE(SAE[PrototypeSAEConfig]):
    """The features of a state are the activations α of its k prototypes, exactly the head's.

        encode(z)_i = α_i of the chosen, else 0        decode(α) = Σ α_i p_i

    ``W_dec`` are the prototypes [K, d]; ``b_dec`` is 0. The error term is the residual r = z − ẑ.
    Not trained here, and with no weights that could be folded.
    """

    @classmethod
    def of(cls, head: PrototypeHead, **metadata: Any) -> PrototypeSAE:
        """Return the dictionary of a head; ``metadata`` says where its states are."""
        config = PrototypeSAEConfig(
            d_in=head.width,
            d_sae=head.num_prototypes,
            apply_b_dec_to_input=False,
            metadata=SAEMetadata(**metadata),
            k=head.prototypes_per_token,
            scale=float(head.scale.detach()),
            weights=head.weights,
        )
        dictionary = cls(config)
        with torch.no_grad():
            dictionary.W_dec.copy_(head.prototypes)
        return dictionary

    def initialize_weights(self) -> None:
        """Make room for the prototypes."""
        assert self.cfg.weights in get_args(Weights)
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        self.W_dec = nn.Parameter(zeros(self.cfg.d_sae, self.cfg.d_in))
        self.b_dec = nn.Parameter(zeros(self.cfg.d_in))

    @property
    def W_enc(self) -> Tensor:  # pyright: ignore
        """The directions that cosines are taken with, [d, K]."""
        return unit_rows(self.W_dec.detach()).T

    def encode(self, x: Tensor) -> Tensor:
        """Return the activations of states [..., d], [..., K], zero but for k of each."""
        states = self.process_sae_in(x)
        flat, k = states.reshape(-1, self.cfg.d_in), self.cfg.k
        if self.cfg.weights == "cosine":
            found = ops.nearest(flat, self.W_dec, k, self.cfg.scale)
        else:
            first = ops.nearest(flat, self.W_dec, min(k, ops.PICKS), self.cfg.scale)
            found = ops.pursue(flat, self.W_dec, k, first.indices)
        dense = flat.new_zeros(len(flat), self.cfg.d_sae)
        dense = dense.scatter(1, found.indices, found.activations.to(dense.dtype))
        dense = self.hook_sae_acts_pre(dense.view(*states.shape[:-1], -1))
        return cast("Tensor", self.hook_sae_acts_post(dense))

    def decode(self, feature_acts: Tensor) -> Tensor:
        """Return Σ α_i p_i."""
        rebuilt = self.hook_sae_recons(feature_acts @ self.W_dec + self.b_dec)
        return self.reshape_fn_out(self.run_time_activation_norm_fn_out(rebuilt), self.d_head)

    def fold_W_dec_norm(self) -> None:
        """Refuse: activations are not linear in the lengths of prototypes."""
        raise NotImplementedError("the lengths of prototypes are part of what they write.")


register_sae_class(ARCHITECTURE, PrototypeSAE, PrototypeSAEConfig)
