"""Words that the checks' verdicts share."""

from __future__ import annotations

from prismlm.instruments.channels.wording import signed
from prismlm.statistics import Interval

CONSTANT = (
    "Says nothing: all own codes are the same, so that there is nothing to tell them apart by. "
    "Take more passes, or the recursion."
)


def with_interval(found: Interval, digits: int = 4) -> str:
    """Return a figure with its interval, as +0.0123 [0.0100, 0.0150]."""
    low, high = (signed(bound, digits) for bound in (found.low, found.high))
    return f"{signed(found.value, digits)} [{low}, {high}]"


def in_points(share: Interval) -> str:
    """Return a difference of shares in percentage points, as +1.23 [1.00, 1.50] points."""
    points = Interval(100 * share.value, 100 * share.low, 100 * share.high)
    return f"{with_interval(points, 2)} points"


def of_texts(texts: int) -> str:
    """Return what a verdict rests on."""
    return f"(one model, {texts} texts)"
