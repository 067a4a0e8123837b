"""The prototype head as a module (PRISM)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head import Routing

Weights = Literal["cosine", "fitted"]


class HeadOutput(NamedTuple):
    """The prototypes of N states, and ẑ = Σ α p; the residual is z − ẑ. Logits do not change."""

    routing: Routing
    reconstruction: Float[Tensor, "N d"]


class HeadLosses(NamedTuple):
    """Unweighted losses: R1, R2, RES and, if requested, DIV of the source."""

    prototype_pull: Float[Tensor, ""]
    point_pull: Float[Tensor, ""]
    residual: Float[Tensor, ""]
    diversity: Float[Tensor, ""] | None


class PrototypeHead(nn.Module):
    """Write a hidden state as a sparse non-negative mixture of prototypes plus a residual.

        c_i = cos(z, p_i)        α_i = ReLU(τ c_i) for the k largest c_i, else 0
        ẑ = Σ α_i p_i            r = z − ẑ            W z = Σ α_i W p_i + W r

    With ``weights="fitted"`` the k prototypes are chosen by matching pursuit, and their weights
    minimise the reconstruction error,

        α = argmin_{α ≥ 0} ‖z − Σ_i α_i p_i‖² + λ Σ_i α_i² ‖p_i‖²        λ = 10⁻³

    so that similar prototypes share a weight instead of each having it in full. Then α_i p_i does
    not depend on τ or the norms of prototypes, and cosines have no gradient. See
    :func:`prismlm.ops.prototype_head.pursue` and :func:`prismlm.ops.prototype_head.fit_weights`.

    The state does not change (z′ = ẑ + r = z), so the head works with any model.
    Source: PRISM: Training Data Prototypes for Language Models (Guide Labs, 2025); fitted weights
    are ours.

    Args:
        width: d, the size of the state that enters the output embedding.
        num_prototypes: K.
        prototypes_per_token: k ≤ K.
        scale: initial τ > 0; its logarithm is learned.
        weights: how the prototypes of a state are chosen and weighted.
    """

    def __init__(
        self,
        width: int,
        num_prototypes: int,
        prototypes_per_token: int,
        *,
        scale: float = 1.0,
        weights: Weights = "cosine",
    ) -> None:
        super().__init__()
        if not 1 <= prototypes_per_token <= num_prototypes:
            raise InputError(
                f"prototypes_per_token is {prototypes_per_token} and there are {num_prototypes} "
                "prototypes: choose 1 ≤ prototypes_per_token ≤ num_prototypes."
            )
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(f"the scale τ must be a positive number, got {scale}.")
        check_choice("weights", weights, get_args(Weights))
        self.weights: Weights = weights
        self.prototypes_per_token = prototypes_per_token
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, width))
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @property
    def num_prototypes(self) -> int:
        """K."""
        return self.prototypes.shape[0]

    @property
    def width(self) -> int:
        """d."""
        return self.prototypes.shape[1]

    @property
    def scale(self) -> Float[Tensor, ""]:
        """τ, the factor on cosines."""
        return self.log_scale.exp()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the prototypes from a normal distribution of standard deviation 1/√d."""
        with torch.no_grad():
            self.prototypes.normal_(std=self.width**-0.5, generator=generator)

    @torch.no_grad()
    def place_on(self, states: Float[Tensor, "K d"]) -> None:
        """Set each prototype to a state z / (k τ), so that k near copies of z sum to it."""
        if states.shape != self.prototypes.shape:
            raise InputError(
                f"expected {list(self.prototypes.shape)} states to place prototypes on, got "
                f"{list(states.shape)}: use more tokens or fewer prototypes."
            )
        self.prototypes.copy_(states / (self.prototypes_per_token * self.scale))

    def forward(
        self,
        z: Float[Tensor, "... d"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        prototypes_per_token: int | None = None,
    ) -> HeadOutput:
        """Route states, with leading dimensions flattened to N, in float32 or better.

        ``mask`` is False on padding, which attracts no prototype. ``prototypes_per_token``
        overrides the head's k, for annealing.
        """
        flat = z.flatten(0, -2)
        flat_mask = None if mask is None else mask.flatten()
        k = self.prototypes_per_token if prototypes_per_token is None else prototypes_per_token
        with torch.autocast(device_type=z.device.type, enabled=False):
            routing = ops.route(flat, self.prototypes, self._first(k), self.scale, flat_mask)
            if self.weights == "fitted":
                fitted = ops.pursue(flat, self.prototypes, k, routing.indices)
                routing = routing._replace(**fitted._asdict())
                # τ has no effect, but DistributedDataParallel expects a gradient.
                routing = routing._replace(activations=fitted.activations + 0 * self.log_scale)
            return HeadOutput(routing, ops.reconstruct(routing, self.prototypes))

    def nearest(self, z: Float[Tensor, "N d"]) -> ops.Nearest:
        """Return the prototypes of states."""
        return self.chosen(z, ops.nearest(z, self.prototypes, self.nearest_needed, self.scale))

    def chosen(self, z: Float[Tensor, "N d"], nearest: ops.Nearest) -> ops.Nearest:
        """Return the prototypes of states, from the ``nearest_needed`` nearest ones."""
        if self.weights == "cosine":
            return nearest
        return ops.pursue(z, self.prototypes, self.prototypes_per_token, nearest.indices)

    @property
    def nearest_needed(self) -> int:
        """The number of nearest prototypes with which the choice of k begins."""
        return self._first(self.prototypes_per_token)

    def _first(self, k: int) -> int:
        return min(k, ops.PICKS) if self.weights == "fitted" else k

    def losses(
        self,
        z: Float[Tensor, "... d"],
        output: HeadOutput,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        residual_reduction: Literal["mean", "sum"] = "mean",
        with_diversity: bool = True,
    ) -> HeadLosses:
        """Return the losses of the states that ``output`` was computed from."""
        flat_mask = None if mask is None else mask.flatten()
        # Under autocast: a mean over K² pairs tolerates rounding, and the product is expensive.
        diversity = ops.diversity(self.prototypes) if with_diversity else None
        with torch.autocast(device_type=z.device.type, enabled=False):
            states = z.flatten(0, -2).to(output.reconstruction.dtype)
            return HeadLosses(
                ops.prototype_pull(output.routing),
                ops.point_pull(output.routing, flat_mask),
                ops.residual(states, output.reconstruction, flat_mask, residual_reduction),
                diversity,
            )
