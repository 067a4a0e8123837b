"""What a command would take: one value for every dry run, and the clock behind its rates."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
SECONDS_MEASURED = 5.0


@dataclass(frozen=True)
class Cost:
    """The expected cost of a command, all of it rough; figures and parts are attributes as well.

    Attributes:
        seconds: of all that is left to do; None: not known.
        memory_bytes: peak.
        disk_bytes: still to be written, at most where ``seconds`` are not known; None: not known.
        figures: what else is known, such as ``tokens`` or ``tokens_per_second``; None: not known.
        parts: costs that this one is made of.
        name: of a part.
        basis: what the estimate rests on, as sentences.
        unknown: what it cannot tell, as sentences.
    """

    seconds: float | None
    memory_bytes: int
    disk_bytes: int | None
    figures: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Cost, ...] = ()
    name: str = ""
    basis: str = ""
    unknown: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        # Only of what is not a field; copying asks for names before there are any figures.
        found = self.__dict__.get("figures", {}) | {
            p.name: p for p in self.__dict__.get("parts", ())
        }
        if name not in found:
            raise AttributeError(f"this cost has no {name}: it has {', '.join(found)}")
        return found[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as JSON values, each part by its name."""
        return {
            **self.figures,
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            **{part.name: part.to_dict() for part in self.parts},
            "basis": self.basis,
            "unknown": list(self.unknown),
        }


def seconds_of(call: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of one call: the mean of some, after one that is not counted."""
    call()
    _wait_for_device()
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait_for_device()
    return (time.perf_counter() - began) / times


def rate_of(
    amounts: Iterable[int], seconds: float = SECONDS_MEASURED, *, enough: float = math.inf
) -> float:
    """Return amounts per second of work that yields how much each step of it did.

    The first step warms up; it counts where it is the only one.

    Args:
        amounts: of each step, which is taken when the amount is asked for.
        seconds: no step is begun after so long.
        enough: nor after so much.

    Returns:
        0 where nothing was done.
    """
    began, done, first, stop = time.perf_counter(), 0, None, math.inf
    for amount in amounts:
        _wait_for_device()
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
    """Return the most bytes that this process held so far: of the GPU, where it computes there."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def _wait_for_device() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
