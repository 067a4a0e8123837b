"""Steps of an optimizer that are saved every minute, and go on from there to the same end."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from prismlm.errors import DivergenceError, FormatError, InputError
from prismlm.files import WAY_OUT, atomic_file, room_to_write
from prismlm.progress import Reporter
from prismlm.run_state import Interrupts

FORMAT_VERSION = 1
SAVE_SECONDS = 60.0
HISTORY_EVERY = 50
WARMUP = 0.05
BETAS = (0.9, 0.95)
GO_ON = "Run the same command again to resume."


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


class Loop(ABC):
    """What is trained with its optimizer, between two steps.

    Attributes:
        what: is trained, as an error has it: "the fit".
        remedy: what to do where it diverges.
        steps: in all.
        step: those taken.
        history: a row of means every fifty steps.
        saved: the file that it goes on from.
        extra: what else is saved in it.
    """

    what: str
    remedy: str

    def __init__(self, trained: nn.Module, groups: list[Any], steps: int, saved: Path) -> None:
        self.trained, self.steps, self.step, self.saved = trained, steps, 0, saved
        self.history: list[dict[str, float]] = []
        self.extra: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._optimizer = torch.optim.Adam(groups, lr=0.0, betas=BETAS)

    @abstractmethod
    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Add the gradients of a step over some rows; return its losses, "loss" among them."""

    @abstractmethod
    def rates(self) -> list[float]:
        """Return the peak rate of each group of parameters."""

    @abstractmethod
    def of(self) -> dict[str, Any]:
        """Return what has to be the same for what was saved to go on."""

    def take(self, rows: np.ndarray) -> dict[str, float]:
        """Take one step; return its losses.

        Raises:
            DivergenceError: the loss is not finite.
        """
        share = self._share(self.step)
        for group, rate in zip(self._optimizer.param_groups, self.rates(), strict=True):
            group["lr"] = share * rate
        self._optimizer.zero_grad()
        found = self.losses(rows)
        self._optimizer.step()
        self.step += 1
        if not math.isfinite(found["loss"]):
            raise DivergenceError(
                f"the loss of {self.what} is {found['loss']} in step {self.step}: {self.remedy}."
            )
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        if self.step % HISTORY_EVERY == 0:
            means = {name: value / HISTORY_EVERY for name, value in self._sums.items()}
            self.history.append({"step": self.step, **means})
            self._sums = {}
        return found

    def _share(self, step: int) -> float:
        warm = max(1, round(WARMUP * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def run(
        self,
        rows: Iterable[np.ndarray],
        title: str,
        shown: str,
        *,
        save_seconds: float = SAVE_SECONDS,
        progress: Reporter,
    ) -> None:
        """Take the steps that are left, saving every so often.

        Args:
            rows: of each of them.
            title: of the task that shows steps done.
            shown: which of the losses stands beside it.
            save_seconds: the least time between two writes.
            progress: shows the task.

        Raises:
            DivergenceError: the loss is not finite.
            PrismError: the disk is full; what was saved before is kept.
            Interrupted: SIGINT or SIGTERM came; it is saved.
        """
        with (
            Interrupts(
                lambda: f"{self.what.capitalize()} is saved in {self.saved}. {GO_ON}"
            ) as interrupts,
            progress.task(title, self.steps, "steps") as task,
        ):
            task.advance(self.step)
            written = time.monotonic()
            for chosen in rows:
                found = self.take(chosen)
                task.advance()
                task.note(f"{shown} {found[shown]:.3f}")
                done = self.step == self.steps
                if interrupts.received or done or time.monotonic() - written >= save_seconds:
                    self.save()
                    written = time.monotonic()
                if interrupts.received:
                    interrupts.stop()

    def save(self) -> None:
        """Write all that the next step depends on."""
        state = {
            "format_version": FORMAT_VERSION,
            "of": self.of(),
            "step": self.step,
            "sums": self._sums,
            "history": self.history,
            "trained": self.trained.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "extra": self.extra,
        }
        room = room_to_write(self.what, self.saved.parent, WAY_OUT)
        with room, atomic_file(self.saved) as temporary:
            torch.save(state, temporary)

    def resume(self) -> bool:
        """Go on from what was saved; say whether there was something.

        Raises:
            FormatError: it is damaged.
            InputError: it is of other settings.
        """
        if not self.saved.is_file():
            return False
        try:
            state: dict[str, Any] = torch.load(self.saved, map_location="cpu", weights_only=True)
            other = state["format_version"] != FORMAT_VERSION or state["of"] != self.of()
            if not other:
                self.trained.load_state_dict(state["trained"])
                self._optimizer.load_state_dict(state["optimizer"])
                self.step, self._sums = state["step"], state["sums"]
                self.history = state["history"]
                self.extra = state["extra"]
        except Exception as error:  # torch raises half a dozen unrelated types here
            raise FormatError(
                f"{self.saved} is damaged ({error}). Remove it, and {self.what} starts anew."
            ) from error
        if other:
            raise InputError(
                f"{self.saved} is of other settings or text. Put the former settings back, or "
                f"remove it, and {self.what} starts anew."
            )
        return True
