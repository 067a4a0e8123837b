"""Training on an existing model: a loop for anything, and the fit of a head to stored states."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from prismlm.errors import DivergenceError, InputError, check_choice, check_number
from prismlm.layers import PrototypeHead
from prismlm.layers.prototype_head import Weights
from prismlm.lens.scan import HiddenStates
from prismlm.models.sidecar import weight_of
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head.fast import has_fast_product
from prismlm.progress import SILENT, Reporter
from prismlm.training import parallel
from prismlm.training.model import OutputMap, VocabularySample, cluster_centres, divergence

HISTORY_EVERY = 50
WARMUP, BETAS = 0.05, (0.9, 0.95)
STATES_PER_CLUSTER, KMEANS_ITERATIONS = 4, 5
# Default number of prototypes: one for so many states, but at most so many.
STATES_PER_PROTOTYPE, MAX_PROTOTYPES = 16, 8192
# Smaller products are not computed in bf16.
MIN_BF16_STATES, MIN_BF16_TOKENS = 128, 4096
MAY_BE_ZERO = ("frequent", "drawn", "residual", "pull", "seed")


def check_options(options: Any, may_be_zero: Collection[str] = ("seed",)) -> None:
    """Check that the numbers of a dataclass are finite and positive, or 0 where they may be."""
    for field in fields(options):
        value, zero = getattr(options, field.name), field.name in may_be_zero
        if value is not None and not isinstance(value, str):
            name = f"{type(options).__name__}.{field.name}"
            expected = "from 0 on" if zero else "above 0"
            check_number(name, value, expected, lambda x, zero=zero: x > 0 or (zero and not x))


def num_steps(count: int, batch: int, epochs: float) -> int:
    """Return the number of optimizer steps of some epochs over ``count`` rows."""
    return max(1, round(epochs * (count // min(batch, count))))


def batches(count: int, size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each step; every epoch has a new order and drops its last rows."""
    size = min(size, count)
    per_epoch, order = count // size, np.empty(0)
    for step in range(steps):
        epoch, batch = divmod(step, per_epoch)
        if batch == 0:
            order = np.random.default_rng([seed, 1, epoch]).permutation(count)
        yield np.sort(order[batch * size : (batch + 1) * size])


class Loop(ABC):
    """Trains parameter groups, each with a peak learning rate ``lr``, for a number of steps.

    By Adam; the rate rises over a twentieth of the steps and falls as a cosine. Several processes
    divide the rows of a step.
    """

    what: str  # for error messages, such as "the fit"
    remedy: str  # how to fix divergence
    share = 1.0  # of the rows of a step, in this process

    def __init__(self, groups: list[dict[str, Any]], steps: int) -> None:
        self.steps, self.step = steps, 0
        # Mean losses of every fifty steps.
        self.history: list[dict[str, float]] = []
        self._recent: list[dict[str, float]] = []
        self._optimizer = torch.optim.Adam(groups, betas=BETAS)
        self._schedule = LambdaLR(self._optimizer, self._rate_factor)

    @abstractmethod
    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Accumulate the gradients of some rows, a ``share`` of a step's.

        Returns their parts of the step's losses, including "loss".
        """

    def take(self, rows: np.ndarray) -> dict[str, float]:
        """Take one step; return its losses."""
        self._optimizer.zero_grad()
        own = rows[parallel.rank() :: parallel.world_size()]
        self.share = len(own) / len(rows)
        parts = self.losses(own)
        parallel.sum_gradients(self._parameters())
        sums = parallel.sum_over_processes(torch.tensor([*parts.values()], dtype=torch.float64))
        losses = dict(zip(parts, sums.tolist(), strict=True))
        self._optimizer.step()
        self._schedule.step()
        self.step += 1
        if not math.isfinite(losses["loss"]):
            raise DivergenceError(
                f"the loss of {self.what} is {losses['loss']} in step {self.step}: {self.remedy}."
            )
        self._recent.append(losses)
        if self.step % HISTORY_EVERY == 0:
            sums = {name: sum(row[name] for row in self._recent) for name in losses}
            means = {name: total / HISTORY_EVERY for name, total in sums.items()}
            self.history.append({"step": self.step, **means})
            self._recent = []
        return losses

    def _rate_factor(self, step: int) -> float:
        warmup = max(1, round(WARMUP * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))

    def run(self, rows: Iterable[np.ndarray], title: str, shown: str, progress: Reporter) -> None:
        """Take a step for each batch of rows, showing the loss named ``shown``."""
        for parameter in self._parameters():
            # On GPUs too, processes may have started from other roundings.
            parallel.broadcast(parameter)
        with progress.task(title, self.steps, "steps") as task:
            for batch in rows:
                losses = self.take(batch)
                task.advance()
                task.note(f"{shown} {losses[shown]:.3f}")
        if not all(bool(p.isfinite().all()) for p in self._parameters()):
            raise DivergenceError(
                f"after the last step of {self.what}, some weights are not finite: {self.remedy}."
            )

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


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
                f"prototypes_per_token is {self.prototypes_per_token}: expected at most the number "
                f"of prototypes, {self.prototypes}."
            )

    def of_states(self, states: int) -> FitOptions:
        """Return the options with ``prototypes`` set, by default from the number of states."""
        if self.prototypes is not None:
            return self
        count = min(MAX_PROTOTYPES, states // STATES_PER_PROTOTYPE)
        return replace(self, prototypes=max(self.prototypes_per_token, count))

    def head(self, width: int) -> PrototypeHead:
        """Return an uninitialised head, of options of_states()."""
        assert self.prototypes is not None
        return PrototypeHead(
            width, self.prototypes, self.prototypes_per_token, weights=self.weights
        )

    def steps(self, states: int) -> int:
        """Return the number of optimizer steps."""
        return num_steps(states, self.batch, self.epochs)


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


def init_prototypes(head: PrototypeHead, states: HiddenStates, seed: int) -> None:
    """Initialise the prototypes at cluster centres of hidden states, each z / (k τ)."""
    count = head.num_prototypes
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
    progress: Reporter = SILENT,
) -> tuple[PrototypeHead, list[dict[str, float]]]:
    """Fit a head to hidden states of a model; return it on the CPU, with the history of losses.

        loss = KL(model ‖ ẑ alone) + residual · mean ‖z − ẑ‖² / mean ‖z‖² + pull · (R1 + R2)

    There are at least as many states as prototypes. DivergenceError: the loss is not finite.
    """
    options = options.of_states(len(states))
    head = options.head(states.width).to(weight_of(model).device)
    init_prototypes(head, states, options.seed)
    # Their size determines the rate, and processes may have rounded otherwise.
    parallel.broadcast(head.prototypes)
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
        self._output_map = OutputMap.from_model(model)
        size = len(self._output_map.weight)
        counts = torch.bincount(states.tokens(), minlength=size)[:size]
        self._vocabulary = VocabularySample(counts, options.frequent, options.drawn)

    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Accumulate the gradients of some states; return their parts of the losses."""
        options, head, share = self.options, self.head, self.share
        if not len(rows):
            # A step of fewer rows than processes: means would not be numbers, but the others wait.
            parallel.largest(head.prototypes.new_full((head.num_prototypes,), -math.inf))
            parallel.sum_over_processes(head.prototypes.new_zeros(()))
            return {"prototype_only_kl": 0.0, "residual": 0.0, "loss": 0.0}
        z = self.states.states(rows).to(self._device)
        output = head(z)
        tokens, log_weights = self._vocabulary.draw(options.seed * 2**32 + self.step)
        output_map = self._output_map.restricted_to(tokens.to(self._device))
        kl = mean_divergence(z, output.reconstruction, output_map, log_weights.to(self._device))
        routing, kl = output.routing, kl * share
        # Of a prototype's nearest states in all processes, R1 takes the nearest.
        nearest = routing.nearest_point_cosine >= parallel.largest(routing.nearest_point_cosine)
        routing = routing._replace(nearest_point=routing.nearest_point.where(nearest, -1))
        # Not head.losses(): DIV would take longer than the routing.
        mean_square = parallel.sum_over_processes(z.square().mean() * share)
        residual = ops.residual(z, output.reconstruction) * share / mean_square
        pull = ops.prototype_pull(routing) + ops.point_pull(routing) * share
        loss = kl + options.residual * residual + options.pull * pull
        loss.backward()
        return {"prototype_only_kl": kl.item(), "residual": residual.item(), "loss": loss.item()}
