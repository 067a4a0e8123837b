"""Methods in the order of the page, for ``attribution.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.shared.figures import paired

SAME = "same answer at random"
MEANING = {
    "explain": "**`explain`**",
    "alone": "`explain`, each prediction alone, without its context prior",
    "random states": "control: random training states as prototypes",
    "shuffled cells": "control: cells shuffled between prototypes",
    "random": "control: passages at random",
    "BM25": "BM25 of the text and the predicted token",
    "BM25, last 16 tokens": "BM25 of the last 16 tokens",
    "nearest states": "nearest hidden states, whatever came next",
    "same token at random": "positions before the same token, at random",
    "count of the token": "how often the predicted token comes next",
    "same token, nearest": "nearest state of all positions before the same token",
    "evidence by position": "the equation over all positions, tuned for tail-patch",
}


def figures(read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the methods by name, and what the page says in short."""
    methods = {one["name"]: one for one in read("attribution/*.json")}
    return {
        "methods": methods,
        "worded": {one["name"]: one for one in read("attribution_wordings/*.json")},
        "meaning": MEANING,
        "words": max(
            methods[name]["patch"]["report"]["gain"]["mean"]
            for name in ("BM25", "BM25, last 16 tokens")
        ),
        "same": SAME,
        "paired": paired,
    }
