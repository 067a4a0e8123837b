"""The expected cost of a command, for dry runs, and the measurements behind it."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Cost:
    """A rough estimate of a command's cost; None means unknown.

    Attributes:
        seconds: for the remaining work.
        memory_bytes: peak.
        disk_bytes: still to be written; an upper bound if ``seconds`` are unknown.
        figures: others, such as ``tokens`` or ``tokens_per_second``.
        basis: what the estimate is based on, as sentences.
        unknown: what cannot be estimated, as sentences.
    """

    seconds: float | None
    memory_bytes: int
    disk_bytes: int | None
    figures: dict[str, Any] = field(default_factory=dict)
    basis: str = ""
    unknown: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as JSON values."""
        value: dict[str, Any] = asdict(self) | {"unknown": list(self.unknown)}
        return value.pop("figures") | value


def seconds_of(call: Callable[[], object], times: int = 1) -> float:
    """Return the mean seconds of a call, after one call to warm up."""
    call()
    _synchronise()
    began = time.perf_counter()
    for _ in range(times):
        call()
    _synchronise()
    return (time.perf_counter() - began) / times


def rate_of(amounts: Iterable[int], seconds: float, *, enough: float = math.inf) -> float:
    """Return amounts per second of work that yields the amount of each step; 0 without steps.

    The first step is a warm-up, and counts only if it is the only one. No step starts after so
    many ``seconds`` or after an amount of ``enough``.
    """
    began, done, first, stop = time.perf_counter(), 0, None, math.inf
    for amount in amounts:
        _synchronise()
        now = time.perf_counter()
        if first is None:
            first = amount / (now - began)
            began, stop = now, now + seconds
            continue
        done += amount
        if done >= enough or now > stop:
            break
    return done / (time.perf_counter() - began) if done else first or 0.0


def peak_memory(device: str = "cpu") -> int:
    """Return the peak memory of this process in bytes; with ``cuda`` that of the GPU."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def _synchronise() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
