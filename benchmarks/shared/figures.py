"""Statistics that several pages share."""

from __future__ import annotations

from typing import Any

import numpy as np


def paired(left: Any, right: Any) -> dict[str, float]:
    """Return the mean of the differences, and its standard error."""
    apart = np.array(left) - np.array(right)
    return {"mean": float(apart.mean()), "error": float(apart.std(ddof=1) / len(apart) ** 0.5)}
