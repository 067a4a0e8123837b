"""Averages of the loss and its parts between two logs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prismlm.training import distributed


class LossMeter:
    """Adds up what forward passes contribute to their steps, in float64, over all processes.

    Its state goes into checkpoints.

    Attributes:
        tokens: all tokens trained on so far, without padding, in all processes.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}

    def add(self, shares: dict[str, Tensor], *, first: bool) -> None:
        """Take in the shares of one forward pass; parts may come in later than the loss.

        Args:
            shares: what the pass contributes to the step's loss and its parts.
            first: whether the pass is the first of its step.
        """
        for name, value in shares.items():
            before = self._sums.get(name)
            value = value.double()
            self._sums[name] = value if before is None else before.to(value.device) + value
            self._steps[name] = self._steps.get(name, 0) + int(first)

    def drain(self) -> dict[str, float]:
        """Return the averages over the steps since the last call, and start again.

        Every process has to call it, as for :meth:`state`, and gets the same.
        """
        sums = self._summed()
        averages = {name: (s / self._steps[name]).item() for name, s in sums.items()}
        self._sums, self._steps = {}, {}
        return averages

    def state(self) -> dict[str, Any]:
        """Return what :meth:`load` needs to go on exactly."""
        return {"tokens": self.tokens, "sums": self._summed(), "counts": dict(self._steps)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.tokens = state["tokens"]
        # The saved sums are those of all processes together.
        factor = 1.0 if distributed.is_main() else 0.0
        self._sums = {name: value * factor for name, value in state["sums"].items()}
        self._steps = dict(state["counts"])

    def _summed(self) -> dict[str, Tensor]:
        if not self._sums:
            return {}
        stacked = torch.stack(list(self._sums.values()))
        return dict(
            zip(self._sums, distributed.sum_over_processes(stacked).cpu().unbind(), strict=True)
        )
