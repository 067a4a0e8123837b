"""Fitting a prototype head to hidden states on disk, without running the model again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice
from prismlm.layers import PrototypeHead
from prismlm.layers.prototype_head import Weights
from prismlm.lens.states import HiddenStates
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head.fast import has_fast_product
from prismlm.progress import SILENT, Reporter
from prismlm.training.loop import Loop, batches, check_options
from prismlm.training.model import OutputMap, VocabularySample, divergence
from prismlm.training.prototypes import cluster_centres

STATES_PER_CLUSTER = 4
KMEANS_ITERATIONS = 5
# Default number of prototypes: one for so many states, but at most so many.
STATES_PER_PROTOTYPE, MAX_PROTOTYPES = 16, 8192
# Smaller products are not computed in bf16.
MIN_BF16_STATES, MIN_BF16_TOKENS = 128, 4096
MAY_BE_ZERO = ("frequent", "drawn", "residual", "pull", "seed")


@dataclass(frozen=True)
class FitOptions:
    """How a head is fitted."""

    prototypes: int | None = None  # K; by default 8,192, or one per 16 states if that is fewer
    prototypes_per_token: int = 64  # k
    epochs: float = 4.0  # passes over the states; may be fractional
    batch: int = 256  # states per step
    # Peak rate of Adam, in units of the root mean square of the initial prototypes' elements.
    learning_rate: float = 0.03
    frequent: int = 6000  # the divergence is over so many of the most frequent tokens,
    drawn: int = 2000  # and over so many of the others, redrawn in each step
    residual: float = 0.1  # weight of ‖z − ẑ‖² / ‖z‖²
    pull: float = 0.01  # weight of R1 and of R2
    weights: Weights = "fitted"  # activations: by cosine, or fitted to reconstruct z
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("weights", self.weights, get_args(Weights))
        check_options(self, may_be_zero=MAY_BE_ZERO)
        if self.prototypes is not None and self.prototypes_per_token > self.prototypes:
            raise InputError(
                f"prototypes_per_token is {self.prototypes_per_token}, more than the "
                f"{self.prototypes} prototypes: choose at most that many."
            )
        if not self.frequent + self.drawn:
            raise InputError(
                "frequent and drawn are both 0, but the divergence needs tokens: raise one of them."
            )

    def of_states(self, states: int) -> FitOptions:
        """Return the options with ``prototypes`` set, by default from the number of states."""
        if self.prototypes is not None:
            return self
        count = min(MAX_PROTOTYPES, states // STATES_PER_PROTOTYPE)
        return replace(self, prototypes=max(self.prototypes_per_token, count))

    def head(self, width: int) -> PrototypeHead:
        """Return an uninitialised head."""
        assert self.prototypes is not None, "call of_states() first"
        return PrototypeHead(
            width, self.prototypes, self.prototypes_per_token, weights=self.weights
        )

    def steps(self, states: int) -> int:
        """Return the number of optimizer steps."""
        return max(1, round(self.epochs * (states // min(self.batch, states))))


def mean_divergence(
    z: Float[Tensor, "N d"],
    reconstruction: Float[Tensor, "N d"],
    output_map: OutputMap,
    log_weights: Float[Tensor, " V"],
) -> Float[Tensor, ""]:
    """Return the mean KL from the prediction of z to that of ẑ, in nats.

    Products may be in bf16, so the logits of ẑ are those of z plus those of ẑ − z: the rounding of
    the former then affects both predictions alike.
    """
    weight, bias, logit_map = output_map
    large = len(z) >= MIN_BF16_STATES and len(weight) >= MIN_BF16_TOKENS
    low_precision = z.device.type == "cpu" and large and has_fast_product()
    weight = weight.to(torch.bfloat16 if low_precision else torch.float32)
    logits = F.linear(z.to(weight.dtype), weight).float()
    if bias is not None:
        logits = logits + bias.float()
    change = F.linear((reconstruction - z).to(weight.dtype), weight).float()
    return divergence(logit_map(logits), logit_map(logits + change), log_weights).mean()


def place(head: PrototypeHead, states: HiddenStates, seed: int) -> None:
    """Initialise the prototypes at cluster centres of hidden states, each z / (k τ)."""
    count = head.num_prototypes
    if len(states) < count:
        raise InputError(
            f"{len(states):,} positions are fewer than the {count:,} prototypes: use more text, "
            "or lower --prototypes."
        )
    generator = np.random.default_rng([seed, 0])
    size = min(len(states), STATES_PER_CLUSTER * count)
    sample = states.states(np.sort(generator.choice(len(states), size, replace=False)))
    sample = sample[generator.permutation(size)].to(head.prototypes.device)
    head.place_on(cluster_centres(sample, count, KMEANS_ITERATIONS))


def fit(
    model: nn.Module,
    states: HiddenStates,
    options: FitOptions,
    *,
    device: str = "cpu",
    progress: Reporter = SILENT,
) -> tuple[PrototypeHead, list[dict[str, float]]]:
    """Fit a head to hidden states of a model; return it on the CPU, with the history of losses.

        loss = KL(model ‖ ẑ alone) + residual · mean ‖z − ẑ‖² / mean ‖z‖² + pull · (R1 + R2)

    Raises:
        InputError: there are fewer states than prototypes.
        DivergenceError: the loss is not finite.
    """
    options = options.of_states(len(states))
    head = options.head(states.width).to(device)
    place(head, states, options.seed)
    fitting = Fitting(model, states, options, head)
    rows = batches(len(states), options.batch, fitting.steps, options.seed)
    fitting.run(rows, "Fitting prototypes", "prototype_only_kl", progress)
    # Rounded before the figures are measured, so that a head can be stored in half the bytes.
    head.prototypes.data = head.prototypes.data.bfloat16().float()
    return head.cpu().eval().requires_grad_(False), fitting.history


class Fitting(Loop):
    """The fit of a head whose prototypes are initialised."""

    what = "the fit"
    remedy = "fit with a lower --rate"

    def __init__(
        self, model: nn.Module, states: HiddenStates, options: FitOptions, head: PrototypeHead
    ) -> None:
        rate = options.learning_rate
        size = head.prototypes.detach().square().mean().sqrt().item()
        groups = [
            {"params": [head.prototypes], "lr": rate * size},
            {"params": [head.log_scale], "lr": rate},
        ]
        super().__init__(groups, options.steps(len(states)))
        self.states, self.options, self.head = states, options, head
        self._device = head.prototypes.device
        self._output_map = OutputMap.from_model(model.to(self._device))
        size = len(self._output_map.weight)
        counts = torch.bincount(states.tokens(), minlength=size)[:size]
        self._vocabulary = VocabularySample(counts, options.frequent, options.drawn)

    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Accumulate the gradients of some states; return their losses."""
        options, head = self.options, self.head
        z = self.states.states(rows).to(self._device)
        output = head(z)
        tokens, log_weights = self._vocabulary.draw(options.seed * 2**32 + self.step)
        output_map = self._output_map.restricted_to(tokens.to(self._device))
        kl = mean_divergence(z, output.reconstruction, output_map, log_weights.to(self._device))
        # Not head.losses(): DIV would take longer than the routing.
        residual = ops.residual(z, output.reconstruction) / z.square().mean()
        pull = ops.prototype_pull(output.routing) + ops.point_pull(output.routing)
        loss = kl + options.residual * residual + options.pull * pull
        loss.backward()
        return {"prototype_only_kl": kl.item(), "residual": residual.item(), "loss": loss.item()}
