"""A training loop with Adam, warm-up and cosine decay, for what is trained on an existing model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from prismlm.errors import DivergenceError, check_number, check_whole
from prismlm.progress import Reporter

HISTORY_EVERY = 50
WARMUP = 0.05
BETAS = (0.9, 0.95)


def check_options(options: Any, prefix: str = "", may_be_zero: Collection[str] = ()) -> None:
    """Check that the numbers of a dataclass are positive, and integers where annotated so."""
    for field in fields(options):
        name, value = prefix + field.name, getattr(options, field.name)
        zero = field.name in may_be_zero
        if value is None or isinstance(value, str):
            continue
        if str(field.type).startswith("int"):
            check_whole(name, value, 0 if zero else 1)
        elif zero:
            check_number(name, value, "0 or more", lambda x: x >= 0)
        else:
            check_number(name, value, "a positive number", lambda x: x > 0)


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
    """Trains parameter groups, each with a peak learning rate ``lr``, for a number of steps."""

    what: str  # for error messages, such as "the fit"
    remedy: str  # how to fix divergence

    def __init__(self, groups: list[dict[str, Any]], steps: int) -> None:
        self.steps, self.step = steps, 0
        # Mean losses of every fifty steps.
        self.history: list[dict[str, float]] = []
        self._recent: list[dict[str, float]] = []
        self._optimizer = torch.optim.Adam(groups, betas=BETAS)
        self._schedule = LambdaLR(self._optimizer, self._rate_factor)

    @abstractmethod
    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Accumulate the gradients of some rows; return their losses, including "loss"."""

    def take(self, rows: np.ndarray) -> dict[str, float]:
        """Take one step; return its losses."""
        self._optimizer.zero_grad()
        losses = self.losses(rows)
        self._optimizer.step()
        self._schedule.step()
        self.step += 1
        if not math.isfinite(losses["loss"]):
            raise DivergenceError(
                f"the loss of {self.what} is {losses['loss']} in step {self.step}: {self.remedy}."
            )
        self._recent.append(losses)
        if self.step % HISTORY_EVERY == 0:
            means = {name: sum(row[name] for row in self._recent) for name in losses}
            means = {name: total / HISTORY_EVERY for name, total in means.items()}
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
        with progress.task(title, self.steps, "steps") as task:
            for batch in rows:
                losses = self.take(batch)
                task.advance()
                task.note(f"{shown} {losses[shown]:.3f}")
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        if not all(bool(p.isfinite().all()) for p in parameters):
            raise DivergenceError(
                f"after the last step of {self.what}, some weights are not finite: {self.remedy}."
            )
