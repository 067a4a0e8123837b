"""What the sections on signal/noise attention share: names of models, and figures as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

DEFAULT = "ratio π"
OTHERS = ("ratio 2", "ratio 1", "λ = 0", "GPT-2", "LLaMA")
"""What the default is held against, claim by claim."""


def mean(values: Iterable[float]) -> str:
    """Return the mean."""
    return f"{statistics.fmean(values):.4g}"
