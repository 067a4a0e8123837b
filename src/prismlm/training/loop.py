"""Steps of Adam with a warm-up and a cosine, for what is trained beside a model that exists."""

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


def check_options(options: Any, name: str = "", may_be_zero: Collection[str] = ()) -> None:
    """Check the numbers of a dataclass: whole where their types say so, and positive."""
    for field in fields(options):
        value, zero, what = (
            getattr(options, field.name),
            field.name in may_be_zero,
            name + field.name,
        )
        if value is None or isinstance(value, str):
            continue
        if str(field.type).startswith("int"):
            check_whole(what, value, 0 if zero else 1)
        elif zero:
            check_number(what, value, "0 or more", lambda x: x >= 0)
        else:
            check_number(what, value, "a positive number", lambda x: x > 0)


def batches(count: int, size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the rows of each step: every epoch has all of them in a new order.

    Rows that do not fill a batch at the end of an epoch are not seen in it.
    """
    size = min(size, count)
    each, order = count // size, np.empty(0)
    for step in range(steps):
        epoch, at = divmod(step, each)
        if at == 0:
            order = np.random.default_rng([seed, 1, epoch]).permutation(count)
        yield np.sort(order[at * size : (at + 1) * size])


class Loop(ABC):
    """What is trained with its optimizer, between two steps.

    Attributes:
        what: is trained, as an error has it: "the fit".
        remedy: what to do where it diverges.
        steps: in all.
        step: those taken.
        history: a row of means every fifty steps.

    Args:
        groups: of parameters, each with its peak rate ``lr``.
        steps: see there.
    """

    what: str
    remedy: str

    def __init__(self, groups: list[dict[str, Any]], steps: int) -> None:
        self.steps, self.step = steps, 0
        self.history: list[dict[str, float]] = []
        self._since_row: list[dict[str, float]] = []
        self._optimizer = torch.optim.Adam(groups, betas=BETAS)
        self._schedule = LambdaLR(self._optimizer, self._share)

    @abstractmethod
    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Add the gradients of a step over some rows; return its losses, "loss" among them."""

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
        self._since_row.append(losses)
        if self.step % HISTORY_EVERY == 0:
            means = {
                name: sum(row[name] for row in self._since_row) / HISTORY_EVERY for name in losses
            }
            self.history.append({"step": self.step, **means})
            self._since_row = []
        return losses

    def _share(self, step: int) -> float:
        warm = max(1, round(WARMUP * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def run(self, rows: Iterable[np.ndarray], title: str, shown: str, progress: Reporter) -> None:
        """Take all steps."""
        with progress.task(title, self.steps, "steps") as task:
            for chosen in rows:
                losses = self.take(chosen)
                task.advance()
                task.note(f"{shown} {losses[shown]:.3f}")
        trained = (p for group in self._optimizer.param_groups for p in group["params"])
        if not all(bool(p.isfinite().all()) for p in trained):
            # The last step's gradient, which no loss shows.
            raise DivergenceError(f"{self.what} ends with what is not finite: {self.remedy}.")
