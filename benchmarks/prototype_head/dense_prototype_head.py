"""A head that mixes prototype activations into logits with a dense matrix: a baseline."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.ops import prototype_head as ops
from prismlm.ops.precision import at_least_float32
from prismlm.ops.prototype_head.routing import check_arguments, inverse_norms


class DensePrototypeHead(nn.Module):
    """Predict from prototype activations through a matrix of their own, as ProtoPNet does.

        c_i = cos(z, p_i)        α_i = ReLU(τ c_i), of all K or of the k largest c_i, else 0
        ℓ = M α,                 M [V, K] learned

    It replaces the output embedding W [V, d], and adds K·V weights. With M = W P it gives the
    logits W ẑ of :class:`prismlm.layers.PrototypeHead` with the same prototypes, k and τ. The
    baseline that the source measures its head against; nothing else in the package uses it.
    Source: PRISM: Training Data Prototypes for Language Models (Guide Labs, 2025),
    "Architecture"; Chen et al., This Looks Like That (2018), for ProtoPNet.

    Args:
        width: d, the size of the state z.
        vocab_size: V.
        num_prototypes: K.
        prototypes_per_token: k ≤ K; None keeps all K activations.
        scale: τ > 0 at the start; it is learned through its logarithm.

    Attributes:
        prototypes: P, one prototype a row, [K, d].
        signatures: Mᵀ, one prototype's logits a row, [K, V]. Stored so that the k rows a token
            needs are contiguous: gathering columns of M is thirty times slower on a CPU.

    Raises:
        InputError: sizes below 1, k outside 1 … K, or a scale that is not positive.
    """

    def __init__(
        self,
        width: int,
        vocab_size: int,
        num_prototypes: int,
        *,
        prototypes_per_token: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        for name, size in (("width", width), ("vocab_size", vocab_size)):
            if size < 1:
                raise InputError(f"{name} is {size}: expected at least 1.")
        k = num_prototypes if prototypes_per_token is None else prototypes_per_token
        if not 1 <= k <= num_prototypes:
            raise InputError(
                f"prototypes_per_token is {prototypes_per_token} and there are {num_prototypes} "
                "prototypes: choose 1 ≤ prototypes_per_token ≤ num_prototypes, or None for all."
            )
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(f"the scale τ must be a positive number, got {scale}.")
        self.prototypes_per_token = prototypes_per_token
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, width))
        self.signatures = nn.Parameter(torch.empty(num_prototypes, vocab_size))
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @property
    def scale(self) -> Float[Tensor, ""]:
        """τ, the positive factor on cosines."""
        return self.log_scale.exp()

    @torch.no_grad()
    def place(self, prototypes: Float[Tensor, "K d"], weight: Float[Tensor, "V d"]) -> None:
        """Set the prototypes, and M = W P: the same function as a prototype head before W.

        Raises:
            InputError: shapes other than [K, d] and [V, d].
        """
        expected = self.prototypes.shape, (self.signatures.shape[1], self.prototypes.shape[1])
        if prototypes.shape != expected[0] or weight.shape != expected[1]:
            raise InputError(
                f"expected prototypes {list(expected[0])} and an output embedding "
                f"{list(expected[1])}, got {list(prototypes.shape)} and {list(weight.shape)}."
            )
        self.prototypes.copy_(prototypes)
        self.signatures.copy_(prototypes @ weight.T)

    def activations(self, z: Float[Tensor, "N d"]) -> Float[Tensor, "N K"]:
        """Return ReLU(τ c) of all K prototypes, in float32 or better; k plays no part."""
        check_arguments(z, self.prototypes, 1)
        with torch.autocast(device_type=z.device.type, enabled=False):
            z = at_least_float32(z)
            prototypes = self.prototypes.to(z.dtype)
            unit_z, unit_p = z * inverse_norms(z), prototypes * inverse_norms(prototypes)
            return torch.relu(self.scale * (unit_z @ unit_p.T))

    def forward(self, z: Float[Tensor, "... d"]) -> Float[Tensor, "... V"]:
        """Return the logits of states; under autocast the product with M of all K is lowered."""
        flat = z.flatten(0, -2)
        if self.prototypes_per_token is None:
            logits = self.activations(flat) @ self.signatures
        else:
            with torch.autocast(device_type=z.device.type, enabled=False):
                routing = ops.route(flat, self.prototypes, self.prototypes_per_token, self.scale)
                logits = F.embedding_bag(
                    routing.indices,
                    self.signatures.to(routing.activations.dtype),
                    per_sample_weights=routing.activations,
                    mode="sum",
                )
        return logits.reshape(*z.shape[:-1], self.signatures.shape[1])
