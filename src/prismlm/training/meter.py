"""Averages of the loss and its parts between two logs."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class LossMeter:
    """Sums losses over micro-batches in float64; its state goes into checkpoints.

    Attributes:
        tokens: all tokens trained on so far, without padding.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, loss: Tensor, parts: dict[str, Tensor], tokens: int) -> None:
        """Take in one micro-batch; parts may come in later than the loss."""
        for name, value in {"loss": loss, **parts}.items():
            before = self._sums.get(name)
            value = value.double()
            self._sums[name] = value if before is None else before.to(value.device) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        self.tokens += tokens

    def drain(self) -> dict[str, float]:
        """Return the averages since the last call, and start again."""
        averages = {name: (s / self._counts[name]).item() for name, s in self._sums.items()}
        self._sums, self._counts = {}, {}
        return averages

    def state(self) -> dict[str, Any]:
        """Return what :meth:`load` needs to go on exactly."""
        sums = {name: value.cpu() for name, value in self._sums.items()}
        return {"tokens": self.tokens, "sums": sums, "counts": dict(self._counts)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.tokens = state["tokens"]
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
