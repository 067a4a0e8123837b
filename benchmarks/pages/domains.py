"""Shares by domain, paired with the controls', for ``domains.md``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.attribution.judges.passage_domains import paired_difference, passage_domain_share
from prismlm.statistics import bootstrap

LEVELS = (0.0, 0.5, 0.7, 0.9, 1.0)


def figures(read: Callable[[str], Any]) -> dict[str, Any]:
    """Return what the page's tables show."""
    result = read("domains.json")
    names, own, shares = result["domains"], result["own"], result["shares"]
    turned = result["turned"]
    shares_of = {
        name: passage_domain_share(np.array(rows), names, own) for name, rows in shares.items()
    }
    behind = {
        name: passage_domain_share(np.array(rows), names, turned["own"])
        for name, rows in turned["shares"].items()
    }
    return {
        "result": result,
        "found": shares_of,
        "less": {name: _less(shares_of["explain"], one) for name, one in shares_of.items()},
        "behind": behind,
        "trust": _trust(result),
        "interval": _interval,
    }


def _interval(values: dict[int, float] | dict[int, bool]) -> str:
    interval = bootstrap(np.array([float(value) for value in values.values()]))
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _less(one: Any, other: Any) -> dict[str, str]:
    pairs = {"own share": (one.own_shares, other.own_shares), "accuracy": (one.hits, other.hits)}
    return {name: _signed(paired_difference(*pair)) for name, pair in pairs.items()}


def _signed(interval: dict[str, float]) -> str:
    low, high = interval["low"], interval["high"]
    text = f"{interval['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def _trust(result: dict[str, Any]) -> list[list[str]]:
    """Return how often the domain with the largest share is the text's own, by that share."""
    own = np.array([result["domains"].index(name) for name in result["own"]])
    shares = np.array(result["shares"]["explain"])
    shares /= shares.sum(1, keepdims=True)
    largest, right = shares.max(1), shares.argmax(1) == own
    rows = {(low, high): (largest > low) & (largest <= high) for low, high in pairwise(LEVELS)}
    return [
        [
            f"{low:.0%} to {high:.0%}",
            str(some.sum()),
            f"{largest[some].mean():.0%}",
            f"{right[some].mean():.0%}",
        ]
        for (low, high), some in rows.items()
        if some.any()
    ]
