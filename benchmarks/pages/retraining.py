"""Scores by method beside models trained again, for ``retraining.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.shared.over_seeds import paired
from prismlm.explain.attribution import TEMPERATURE

Row = dict[str, Any]
PRODUCT = f"explain T={TEMPERATURE:g}"
GRADIENTS = ("last-layer K-FAC", "gradient cosine", "gradient, diagonal Fisher")
MEANING = {
    "random": "control: documents at random",
    "count of the token": "control: how often the predicted token comes next",
    "bm25": "BM25 of the text and the predicted token",
    "nearest states": "nearest hidden states, whatever came next",
    "nearest with the same token": "nearest state before the same token",
    "last-layer K-FAC": "influence through the output layer, K-FAC",
    "gradient cosine": "gradient cosine, all weights",
    "gradient, diagonal Fisher": "gradient product over the diagonal Fisher, all weights",
    "Bergson EK-FAC": "Bergson's EK-FAC",
    "Bergson TrackStar": "Bergson's TrackStar",
    "Bergson gradient cosine": "Bergson's gradient cosine",
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return LDS of every method, beside the product and the best choice."""
    lds, lost, time = (
        read(f"attribution_{name}.json") for name in ("datamodels", "forgetting", "ekfac_time")
    )
    tool = read("attribution_bergson.json")
    methods, chosen = lds["methods"], best_choice(lds)
    judged = tool["methods"]
    other = ~np.array(lds["searched"])
    rivals = {name: methods[name]["each"] for name in GRADIENTS}
    rivals |= {name: m["lds"]["each"] for name, m in judged.items() if name.startswith("Bergson")}
    beaten = {
        name: paired(np.array(methods[chosen]["each"])[other], np.array(values)[other])
        for name, values in rivals.items()
    }
    least = min(beaten, key=lambda name: beaten[name]["mean"])
    return {
        "lds": lds,
        "chosen": chosen,
        "methods": methods,
        "product": PRODUCT,
        "least": MEANING[least],
        "over_least": beaten[least],
        "shown": _shown(methods, chosen),
        "less_resampled": lambda name: _less_resampled(methods, chosen, name),
        "resampled_error": lambda name: float(np.std(methods[name]["resampled"], ddof=1)),
        "judged": judged,
        "tool": tool,
        "lost": lost,
        "lost_each": {n: np.array(m["each"]).mean(1) for n, m in lost["methods"].items()},
        "time": time,
        "name_of": name_of,
        "paired": paired,
        "environments": [one["environment"] for one in (lds, tool, lost, *time["runs"])],
    }


def best_choice(lds: Row) -> str:
    """Return the name of the evidence that did best on the half to choose on.

    Its controls are of the same equation, and none of those has the token read last.
    """
    methods = lds["methods"]
    tried = [name for name in methods if name.startswith("evidence") and "same=" not in name]
    return max(tried, key=lambda name: methods[name]["search"]["mean"])


def _shown(methods: Row, chosen: str) -> list[str]:
    temperature = chosen.split()[1]
    names = [chosen, f"evidence {temperature} cells=all", PRODUCT]
    names += [name for name in methods if name.startswith(("explain", "alone"))]
    names += [f"random states {temperature}", *MEANING]
    return [name for name in dict.fromkeys(names) if name in methods]


def _less_resampled(methods: Row, chosen: str, name: str) -> dict[str, float]:
    apart = np.array(methods[chosen]["resampled"]) - np.array(methods[name]["resampled"])
    difference = methods[chosen]["all"]["mean"] - methods[name]["all"]["mean"]
    return {"mean": difference, "error": float(apart.std(ddof=1))}


def name_of(name: str) -> str:
    """Return what a method is called on the page."""
    if name in MEANING:
        return MEANING[name]
    kind, temperature, *rest = name.replace("random states", "random").split()
    temperature = temperature.replace("=", " ")
    if kind in ("explain", "alone"):
        return "**`explain`**" if name == PRODUCT else "`explain`, each prediction alone"
    if kind == "random":
        return f"control: random states as prototypes, {temperature}"
    where = {"cells=16": "16 cells", "cells=all": "every position"}
    return f"evidence by position, {temperature}, {', '.join(where.get(p, p) for p in rest)}"
