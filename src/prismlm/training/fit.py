"""Fitting a prototype head to hidden states that are kept on disk: the model is not run again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import DivergenceError, FormatError, InputError
from prismlm.files import atomic_file, room_to_write
from prismlm.index.states import HiddenStates
from prismlm.interrupts import Interrupts
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.ops import prototype_head as ops
from prismlm.ops.spherical_kmeans import spherical_kmeans
from prismlm.progress import SILENT, Reporter

FORMAT_VERSION = 1
SAVE_SECONDS = 60.0
HISTORY_EVERY = 50
# What k-means clusters: so many states for each prototype.
STATES_PER_CLUSTER = 4
KMEANS_ITERATIONS = 5
WARMUP = 0.05
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class FitOptions:
    """How a head is fitted.

    Attributes:
        prototypes: K.
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
        seed: of everything random.
    """

    prototypes: int = 8192
    prototypes_per_token: int = 32
    epochs: float = 4.0
    batch: int = 256
    learning_rate: float = 0.03
    frequent: int = 6000
    drawn: int = 2000
    residual: float = 0.1
    pull: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("frequent", "drawn", "residual", "pull", "seed") else 1e-12
            if not least <= value < math.inf:
                wanted = "0 or more" if least == 0 else "a positive number"
                raise InputError(f"{field.name} is {value}: expected {wanted}.")
        if self.prototypes_per_token > self.prototypes:
            raise InputError(
                f"prototypes_per_token is {self.prototypes_per_token}, more than the "
                f"{self.prototypes} prototypes: choose at most that many."
            )
        if not self.frequent + self.drawn:
            raise InputError("frequent and drawn are 0: the divergence needs some tokens.")

    def steps(self, states: int) -> int:
        """Return the optimizer steps for so many states."""
        return max(1, round(self.epochs * (states // min(self.batch, states))))


class Vocabulary:
    """The part of a vocabulary that one step compares two predictions over.

        KL(p ‖ q) over F ∪ D,   p and q being softmaxes in which a token of D counts (V − |F|) / |D|

    F are the tokens most frequent in the corpus, in every step; D are drawn from the others for
    each step. A drawn token stands for those that were not, so the sums that normalise p and q are
    estimated without bias; over the whole vocabulary it is the plain divergence.

    Args:
        model: with the output embedding W, its bias and what follows it.
        tokens: the tokens that follow the states, to count; int64 [N].
        frequent: |F|.
        drawn: |D|.
    """

    def __init__(
        self, model: nn.Module, tokens: Int64[Tensor, " N"], frequent: int, drawn: int
    ) -> None:
        embedding = output_embedding(model)
        assert isinstance(embedding.weight, Tensor)
        self.weight = embedding.weight.detach()
        self.bias = getattr(embedding, "bias", None)
        self.logit_map = LogitMap.of(model)
        size = len(self.weight)
        counts = torch.bincount(tokens, minlength=size)[:size]
        order = counts.argsort(descending=True, stable=True)
        self.frequent, self.rare = order[:frequent], order[frequent:]
        self.drawn = min(drawn, len(self.rare))

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the tokens of a step and the logarithm of what each counts."""
        rare = self.rare
        if self.drawn < len(rare):
            rare = rare[torch.randint(len(rare), (self.drawn,), generator=generator)]
        tokens = torch.cat([self.frequent, rare])
        counted = torch.zeros(len(tokens))
        if self.drawn:
            counted[len(self.frequent) :] = math.log(len(self.rare) / self.drawn)
        return tokens, counted

    def divergence(
        self,
        z: Float[Tensor, "N d"],
        rebuilt: Float[Tensor, "N d"],
        tokens: Int64[Tensor, " S"],
        counted: Float[Tensor, " S"],
    ) -> Float[Tensor, ""]:
        """Return the mean divergence of what ẑ predicts from what z predicts, in nats."""
        device = self.weight.device
        tokens, counted = tokens.to(device), counted.to(device)
        weight = self.weight[tokens].float()
        bias = None if self.bias is None else self.bias.detach()[tokens].float()
        target, own = (
            F.log_softmax(self.logit_map(F.linear(state, weight, bias)) + counted, -1)
            for state in (z, rebuilt)
        )
        return F.kl_div(own, target, reduction="batchmean", log_target=True)


def place(head: PrototypeHead, states: HiddenStates, seed: int) -> None:
    """Put the prototypes on the centres of clusters of hidden states, each as z / (k τ).

    Spherical k-means over a few states for each prototype; the centres have the states' mean norm.

    Raises:
        InputError: fewer states than prototypes.
    """
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
    found = spherical_kmeans(sample, sample[:count], KMEANS_ITERATIONS)
    head.place_on(found.centres * sample.norm(dim=-1).mean())


def batches(count: int, size: int, first: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the rows of each step from ``first`` on: every epoch has all of them in a new order.

    Rows that do not fill a batch at the end of an epoch are not seen in it.
    """
    size = min(size, count)
    each, order, epoch = count // size, np.empty(0), -1
    for step in range(first, steps):
        if step // each != epoch:
            epoch = step // each
            order = np.random.default_rng([seed, 1, epoch]).permutation(count)
        at = step % each * size
        yield np.sort(order[at : at + size])


def fit(
    model: nn.Module,
    states: HiddenStates,
    options: FitOptions,
    saved: Path,
    *,
    device: str = "cpu",
    save_seconds: float = SAVE_SECONDS,
    progress: Reporter = SILENT,
) -> tuple[PrototypeHead, list[dict[str, float]]]:
    """Fit a head; go on from ``saved`` where it is there.

        loss = KL(model ‖ ẑ alone) + residual · mean ‖z − ẑ‖² / mean ‖z‖² + pull · (R1 + R2)

    Args:
        model: whose output embedding turns states into logits; it is not run, and not changed.
        states: its hidden states.
        options: see :class:`FitOptions`.
        saved: a file that the fit goes on from after an interrupt; written every minute.
        device: where the head is fitted.
        save_seconds: the least time between two writes of it.
        progress: shows steps done.

    Returns:
        The head, in evaluation mode on the CPU, and one row of losses every fifty steps.

    Raises:
        InputError: fewer states than prototypes.
        FormatError: ``saved`` is damaged.
        DivergenceError: the loss is not finite.
        PrismError: the disk is full; what was saved before is kept.
        IndexInterrupted: SIGINT or SIGTERM came; the fit is saved.
    """
    head = PrototypeHead(states.width, options.prototypes, options.prototypes_per_token).to(device)
    fitting = Fitting(model, states, options, head, saved)
    with (
        Interrupts(lambda: f"The fit is saved in {saved}.") as interrupts,
        progress.task("Fitting prototypes", fitting.steps, "steps") as task,
    ):
        if not fitting.resume():
            place(head, states, options.seed)
            fitting.begin()
        task.advance(fitting.step)
        written = time.monotonic()
        rows = batches(len(states), options.batch, fitting.step, fitting.steps, options.seed)
        for chosen in rows:
            parts = fitting.take(chosen)
            task.advance()
            if fitting.step % HISTORY_EVERY == 0:
                task.note(f"KL {parts['prototype_only_kl']:.3f}")
            done = fitting.step == fitting.steps
            if interrupts.received or done or time.monotonic() - written >= save_seconds:
                fitting.save()
                written = time.monotonic()
            if interrupts.received and not done:
                interrupts.stop()
    return head.cpu().eval().requires_grad_(False), fitting.history


class Fitting:
    """A head with its optimizer, between two steps."""

    def __init__(
        self,
        model: nn.Module,
        states: HiddenStates,
        options: FitOptions,
        head: PrototypeHead,
        saved: Path,
    ) -> None:
        self.states, self.options, self.head, self.saved = states, options, head, saved
        self.steps, self.step = options.steps(len(states)), 0
        self.history: list[dict[str, float]] = []
        self._device = head.prototypes.device
        self._vocabulary = Vocabulary(
            model.to(self._device), states.tokens(), options.frequent, options.drawn
        )
        self._size = 1.0
        self._sums: dict[str, float] = {}
        self._optimizer = torch.optim.Adam(
            [{"params": [head.prototypes]}, {"params": [head.log_scale]}], lr=0.0, betas=BETAS
        )

    def begin(self) -> None:
        """Note how large the prototypes are, which the rate is in units of."""
        self._size = self.head.prototypes.detach().square().mean().sqrt().item()

    def take(self, rows: np.ndarray) -> dict[str, float]:
        """Take one step; return its losses."""
        options, head = self.options, self.head
        share = self._rate(self.step)
        self._optimizer.param_groups[0]["lr"] = share * options.learning_rate * self._size
        self._optimizer.param_groups[1]["lr"] = share * options.learning_rate
        z = self.states.states(rows).to(self._device)
        output = head(z)
        generator = torch.Generator().manual_seed(options.seed * 2**32 + self.step)
        kl = self._vocabulary.divergence(
            z, output.reconstruction, *self._vocabulary.draw(generator)
        )
        # Not all of the head's losses: DIV alone would take longer than finding the prototypes.
        residual = ops.residual(z, output.reconstruction) / z.square().mean()
        pull = ops.prototype_pull(output.routing) + ops.point_pull(output.routing)
        loss = kl + options.residual * residual + options.pull * pull
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.step += 1
        found = {"prototype_only_kl": kl.item(), "residual": residual.item(), "loss": loss.item()}
        if not math.isfinite(found["loss"]):
            raise DivergenceError(
                f"the loss is {found['loss']} in step {self.step}: fit with a lower --rate."
            )
        self._note(found)
        return found

    def _rate(self, step: int) -> float:
        warm = max(1, round(WARMUP * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def _note(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        if self.step % HISTORY_EVERY == 0:
            means = {name: value / HISTORY_EVERY for name, value in self._sums.items()}
            self.history.append({"step": self.step, **means})
            self._sums = {}

    def save(self) -> None:
        """Write all that the next step depends on."""
        state = {
            "format_version": FORMAT_VERSION,
            "of": self._of(),
            "step": self.step,
            "size": self._size,
            "sums": self._sums,
            "history": self.history,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        directory, way_out = self.saved.parent, "Make room, and give the same command again."
        with room_to_write("the fit", directory, way_out), atomic_file(self.saved) as temporary:
            torch.save(state, temporary)

    def resume(self) -> bool:
        """Go on from what was saved; say whether there was something."""
        if not self.saved.is_file():
            return False
        try:
            state: dict[str, Any] = torch.load(self.saved, map_location="cpu", weights_only=True)
            other = state["format_version"] != FORMAT_VERSION or state["of"] != self._of()
            if not other:
                self.head.load_state_dict(state["head"])
                self._optimizer.load_state_dict(state["optimizer"])
                self.step, self._size = state["step"], state["size"]
                self._sums, self.history = state["sums"], state["history"]
        except Exception as error:  # torch raises half a dozen unrelated types here
            raise FormatError(
                f"{self.saved} is damaged ({error}). Remove it, and the fit starts anew."
            ) from error
        if other:
            raise InputError(
                f"{self.saved} is of a fit with other settings or states. Put the former settings "
                "back, or remove it to fit anew."
            )
        return True

    def _of(self) -> dict[str, Any]:
        return {"options": asdict(self.options), "states": self.states.fingerprint}
