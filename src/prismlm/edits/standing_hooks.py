"""Hooks that stand on modules while at least one block needs them, whatever thread it is in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

Handles = tuple[RemovableHandle, ...]


class _Standing(NamedTuple):
    blocks: int
    handles: Handles


class StandingHooks:
    """The hooks of each module, with how many blocks need them.

    They are put up by the first block and taken down by the last, in any order of leaving.
    """

    def __init__(self) -> None:
        self._standing: dict[nn.Module, _Standing] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many modules have hooks now."""
        return len(self._standing)

    def stand(self, module: nn.Module, register: Callable[[], Handles]) -> None:
        """Count one block more, and put its hooks up if it is the first."""
        with self._lock:
            blocks, handles = self._standing.get(module, _Standing(0, ()))
            self._standing[module] = _Standing(blocks + 1, handles if blocks else register())

    def step_down(self, module: nn.Module) -> None:
        """Count one block less, and take its hooks down if it was the last."""
        with self._lock:
            blocks, handles = self._standing.pop(module)
            if blocks > 1:
                self._standing[module] = _Standing(blocks - 1, handles)
                return
            for handle in handles:
                handle.remove()
