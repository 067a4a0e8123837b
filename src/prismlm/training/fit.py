"""Fitting a prototype head to hidden states that are kept on disk: the model is not run again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice
from prismlm.layers import PrototypeHead
from prismlm.layers.prototype_head import Weights
from prismlm.lens.states import HiddenStates
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head.fast import has_fast_product
from prismlm.progress import SILENT, Reporter
from prismlm.training.loop import Loop, batches, check_options
from prismlm.training.losses import VocabularySample
from prismlm.training.prototypes import cluster_centres

# What k-means clusters: so many states for each prototype.
STATES_PER_CLUSTER = 4
KMEANS_ITERATIONS = 5
# What is fitted where no number is given: as many, if there are so many states for each.
MOST_PROTOTYPES, STATES_OF_EACH = 8192, 16
# The least states and tokens of a step whose logits are formed in bf16.
LEAST_STATES, LEAST_TOKENS = 128, 4096
MAY_BE_ZERO = ("frequent", "drawn", "residual", "pull", "seed")


@dataclass(frozen=True)
class FitOptions:
    """How a head is fitted.

    Attributes:
        prototypes: K; None: 8,192, or one for 16 states where these are fewer.
        prototypes_per_token: k.
        epochs: how often every state is seen; a fraction is allowed.
        batch: states of a step.
        learning_rate: peak rate of Adam, in units of the root mean square of the prototypes'
            elements when they are placed; it rises over 5 % of the steps, then falls as a cosine.
        frequent: tokens of the vocabulary, the most frequent ones of the corpus, that the
            divergence is taken over in every step.
        drawn: of the others, how many are drawn anew for each step.
        residual: weight of ‖z − ẑ‖² over ‖z‖², beside 1 for the divergence.
        pull: weight of R1 and of R2.
        weights: how a state's prototypes are chosen and weighed: by their cosines, or fitted to
            rebuild it best.
        seed: of everything random.
    """

    prototypes: int | None = None
    prototypes_per_token: int = 64
    epochs: float = 4.0
    batch: int = 256
    learning_rate: float = 0.03
    frequent: int = 6000
    drawn: int = 2000
    residual: float = 0.1
    pull: float = 0.01
    weights: Weights = "fitted"
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
            raise InputError("frequent and drawn are 0: the divergence needs some tokens.")

    def of_states(self, states: int) -> FitOptions:
        """Return the same with a number of prototypes, for so many states where none was given."""
        if self.prototypes is not None:
            return self
        count = min(MOST_PROTOTYPES, states // STATES_OF_EACH)
        return replace(self, prototypes=max(self.prototypes_per_token, count))

    def head(self, width: int) -> PrototypeHead:
        """Return the head that is fitted, its prototypes not yet set."""
        assert self.prototypes is not None, "of_states() says how many"
        return PrototypeHead(
            width, self.prototypes, self.prototypes_per_token, weights=self.weights
        )

    def steps(self, states: int) -> int:
        """Return the optimizer steps for so many states."""
        return max(1, round(self.epochs * (states // min(self.batch, states))))


class Vocabulary(VocabularySample):
    """A sample of a model's vocabulary, by the tokens that follow the states, with W."""

    def __init__(
        self, model: nn.Module, tokens: Int64[Tensor, " N"], frequent: int, drawn: int
    ) -> None:
        embedding = output_embedding(model)
        assert isinstance(embedding.weight, Tensor)
        self.weight = embedding.weight.detach()
        self.bias = getattr(embedding, "bias", None)
        self.logit_map = LogitMap.of(model)
        size = len(self.weight)
        super().__init__(torch.bincount(tokens, minlength=size)[:size], frequent, drawn)

    def divergence(
        self,
        z: Float[Tensor, "N d"],
        rebuilt: Float[Tensor, "N d"],
        tokens: Int64[Tensor, " S"],
        log_counts: Float[Tensor, " S"],
    ) -> Float[Tensor, ""]:
        """Return the mean divergence of what ẑ predicts from what z predicts, in nats.

        Logits of ẑ are those of z and of ẑ − z: where products are in bf16, the rounding of the
        former is in both predictions, and that of the latter is 2⁻⁸ of a difference at most.
        """
        device = self.weight.device
        tokens, log_counts = tokens.to(device), log_counts.to(device)
        weight = self.weight[tokens].float()
        large = len(z) >= LEAST_STATES and len(weight) >= LEAST_TOKENS
        if z.device.type == "cpu" and large and has_fast_product():
            weight = weight.bfloat16()
        logits = F.linear(z.to(weight.dtype), weight).float()
        if self.bias is not None:
            logits = logits + self.bias.detach()[tokens].float()
        change = F.linear((rebuilt - z).to(weight.dtype), weight).float()
        target, own = (
            F.log_softmax(self.logit_map(raw) + log_counts, -1) for raw in (logits, logits + change)
        )
        return F.kl_div(own, target, reduction="batchmean", log_target=True)


def place(head: PrototypeHead, states: HiddenStates, seed: int) -> None:
    """Put the prototypes on centres of clusters of hidden states, each as z / (k τ)."""
    count = head.num_prototypes
    if len(states) < count:
        raise InputError(
            f"there are {len(states):,} positions to place {count:,} prototypes on: use more text, "
            "or --prototypes with a lower number."
        )
    generator = np.random.default_rng([seed, 0])
    wanted = min(len(states), STATES_PER_CLUSTER * count)
    sample = states.states(np.sort(generator.choice(len(states), wanted, replace=False)))
    sample = sample[generator.permutation(wanted)].to(head.prototypes.device)
    head.place_on(cluster_centres(sample, count, KMEANS_ITERATIONS))


def fit(
    model: nn.Module,
    states: HiddenStates,
    options: FitOptions,
    *,
    device: str = "cpu",
    progress: Reporter = SILENT,
) -> tuple[PrototypeHead, list[dict[str, float]]]:
    """Fit a head to hidden states of a model, which is not run.

        loss = KL(model ‖ ẑ alone) + residual · mean ‖z − ẑ‖² / mean ‖z‖² + pull · (R1 + R2)

    Returns:
        The head, in evaluation mode on the CPU, its prototypes rounded to bf16, and one row of
        losses every fifty steps.

    Raises:
        InputError: fewer states than prototypes.
        DivergenceError: the loss is not finite.
    """
    options = options.of_states(len(states))
    head = options.head(states.width).to(device)
    place(head, states, options.seed)
    fitting = Fitting(model, states, options, head)
    rows = batches(len(states), options.batch, fitting.steps, options.seed)
    fitting.run(rows, "Fitting prototypes", "prototype_only_kl", progress)
    # So that a head can be kept in half the bytes; its figures are measured after this.
    head.prototypes.data = head.prototypes.data.bfloat16().float()
    return head.cpu().eval().requires_grad_(False), fitting.history


class Fitting(Loop):
    """A head whose prototypes are placed, with its optimizer, between two steps."""

    what = "the fit"
    remedy = "fit with a lower --rate"

    def __init__(
        self, model: nn.Module, states: HiddenStates, options: FitOptions, head: PrototypeHead
    ) -> None:
        rate = options.learning_rate
        # In units of the prototypes' elements.
        size = head.prototypes.detach().square().mean().sqrt().item()
        groups = [
            {"params": [head.prototypes], "lr": rate * size},
            {"params": [head.log_scale], "lr": rate},
        ]
        super().__init__(groups, options.steps(len(states)))
        self.states, self.options, self.head = states, options, head
        self._device = head.prototypes.device
        self._vocabulary = Vocabulary(
            model.to(self._device), states.tokens(), options.frequent, options.drawn
        )

    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Add the gradients of a step; return its losses."""
        options, head = self.options, self.head
        z = self.states.states(rows).to(self._device)
        output = head(z)
        drawn = self._vocabulary.draw(options.seed * 2**32 + self.step)
        kl = self._vocabulary.divergence(z, output.reconstruction, *drawn)
        # Not all of the head's losses: DIV alone would take longer than finding the prototypes.
        residual = ops.residual(z, output.reconstruction) / z.square().mean()
        pull = ops.prototype_pull(output.routing) + ops.point_pull(output.routing)
        loss = kl + options.residual * residual + options.pull * pull
        loss.backward()
        return {"prototype_only_kl": kl.item(), "residual": residual.item(), "loss": loss.item()}
