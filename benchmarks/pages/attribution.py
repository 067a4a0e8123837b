"""Methods in the order of the page, and paired differences, for ``attribution.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.shared.figures import paired

CONTROLS = ("random", "random states", "shuffled cells")
RIVALS = (
    *("BM25", "BM25, last 16 tokens", "nearest states"),
    *("same token at random", "count of the token", "same token, nearest"),
)
MEANING = {
    "explain": "**`explain`**: the product, from its lens on disk",
    "random": "control: passages at random",
    "alone": "the same, with each prediction as if no text stood before it",
    "random states": "control: random training states as prototypes",
    "shuffled cells": "control: every prototype is given another one's cell",
    "BM25": "BM25 (the text and the predicted token)",
    "BM25, last 16 tokens": "BM25, with the last 16 tokens alone",
    "nearest states": "nearest hidden states, whatever came next",
    "same token at random": "the predicted token came next, at random",
    "count of the token": "how often the predicted token comes next",
    "same token, nearest": "the predicted token came next, nearest state of all positions",
    "evidence by position": "the equation over all positions in memory, with the choices that a "
    "search found best by tail-patch",
}


def figures(read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the methods by name, and what the page says in short."""
    methods = {one["name"]: one for one in read("attribution/*.json")}
    gains = {
        name: methods[name]["patch"]["report"]["gain"]["mean"]
        for name in (*CONTROLS, *RIVALS)
        if "patch" in methods.get(name, {})
    }
    own = methods["explain"]
    untrained = {
        name: [one["report"] for one in (own[judge], methods["random states"][judge])]
        for name, judge in (("recall", "recall"), ("tail-patch", "patch"), ("domains", "domains"))
    }
    random_states = {
        "recall": [one["mean"] for one in untrained["recall"]],
        "tail-patch": [one["gain"]["mean"] for one in untrained["tail-patch"]],
        "own share": [one["alike"]["own_share"] for one in untrained["domains"]],
        "accuracy": [one["alike"]["accuracy"] for one in untrained["domains"]],
    }
    patch = own["patch"]["report"]["gain"]["mean"]
    return {
        "methods": methods,
        "worded": {one["name"]: one for one in read("attribution_wordings/*.json")},
        "meaning": MEANING,
        "above": [name for name, gain in gains.items() if gain >= patch],
        "words": max(gains[name] for name in RIVALS[:2] if name in gains),
        "random_states": random_states,
        "not_above": [name for name, (ours, theirs) in random_states.items() if ours <= theirs],
        "paired": paired,
    }
