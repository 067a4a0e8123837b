"""Scores by method beside models trained again, for ``retraining.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.attribution.judges.passages import mean_with_error
from benchmarks.shared.figures import paired
from prismlm.explain.positions import TEMPERATURE

Row = dict[str, Any]
PRODUCT = f"explain T={TEMPERATURE:g}"
GRADIENTS = ("last-layer K-FAC", "gradient cosine", "gradient, diagonal Fisher")
MEANING = {
    "random": "control: documents at random",
    "count of the token": "control: how often the predicted token comes next",
    "bm25": "BM25 (the text and the predicted token)",
    "nearest states": "nearest hidden states, whatever came next",
    "nearest with the same token": "the predicted token came next, nearest state",
    "last-layer K-FAC": "influence by the output layer alone, K-FAC",
    "gradient cosine": "cosine of gradients, all weights",
    "gradient, diagonal Fisher": "product of gradients over the diagonal Fisher, all weights",
    "Bergson EK-FAC": "Bergson's EK-FAC",
    "Bergson TrackStar": "Bergson's TrackStar",
    "Bergson gradient cosine": "Bergson's cosine of gradients",
}
REST = {
    "cells=1": "the one cell with the most evidence",
    "cells=4": "the four cells with the most evidence",
    "signed": "other next tokens count against",
    "doubt=1": "what the model was sure of counts less",
    "whitened=1": "states whitened",
    "by_prototype": "each prototype's evidence kept within its cell",
    "same=10": "what is after the same token counts ten times, as in `explain`",
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return LDS and QLD of every method, beside the product and the best choice."""
    lds, lost, time = (
        read(f"attribution_{name}.json") for name in ("datamodels", "forgetting", "ekfac_time")
    )
    tool, later = read("attribution_bergson.json"), read("attribution_removed.json")
    asked = {name: len(one["qld"]["each"]) for name, one in tool["methods"].items() if "qld" in one}
    methods, chosen = lds["methods"], best_choice(lds)
    judged = _with_more(tool["methods"], later["methods"])
    other = ~np.array(lds["searched"])
    rivals = {name: methods[name]["each"] for name in GRADIENTS}
    rivals |= {name: m["lds"]["each"] for name, m in judged.items() if name.startswith("Bergson")}
    beaten = {
        name: paired(np.array(methods[chosen]["each"])[other], np.array(values)[other])
        for name, values in rivals.items()
    }
    least = min(beaten, key=lambda name: beaten[name]["mean"])
    shared = [name for name in judged if name in methods]
    return {
        "lds": lds,
        "chosen": chosen,
        "methods": methods,
        "product": PRODUCT,
        "temperature": f"{TEMPERATURE:g}",
        "least": MEANING[least],
        "over_least": beaten[least],
        "random_states": f"random states {chosen.split()[1]}",
        "shown": _shown(methods, chosen),
        "less_resampled": lambda name: _less_resampled(methods, chosen, name),
        "resampled_error": lambda name: float(np.std(methods[name]["resampled"], ddof=1)),
        "tried": _tried(methods),
        "judged": judged,
        "tool": tool,
        "later": later,
        "asked": asked,
        "removed": " ".join(f'"{name}"' for name in later["methods"]),
        "ours_words": " ".join(f'"{name}"' for name in judged if not name.startswith("Bergson")),
        "apart": max(
            abs(judged[name]["lds"]["mean"] - methods[name]["all"]["mean"]) for name in shared
        ),
        "lost": lost,
        "lost_each": {n: np.array(m["each"]).mean(1) for n, m in lost["methods"].items()},
        "time": time,
        "name_of": name_of,
        "paired": paired,
        "both": lambda ours, theirs: paired(*zip(*zip(ours, theirs, strict=False), strict=True)),
        "environments": [one["environment"] for one in (lds, tool, later, lost, *time["runs"])],
    }


def best_choice(lds: Row) -> str:
    """Return the name of the evidence that did best on the half to choose on.

    Its controls are of the same equation, and none of those has the token read last.
    """
    methods = lds["methods"]
    tried = [name for name in methods if name.startswith("evidence") and "same=" not in name]
    return max(tried, key=lambda name: methods[name]["search"]["mean"])


def _with_more(methods: Row, later: Row) -> Row:
    """Return what Bergson judged, with the QLD of the predictions that it judged later."""
    found = dict(methods)
    for name, more in later.items():
        each = [*methods[name]["qld"]["each"], *more["qld"]["each"]]
        found[name] = methods[name] | {"qld": mean_with_error(np.array(each)) | {"each": each}}
    return found


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


def _tried(methods: Row) -> list[tuple[str, str]]:
    """Return what else was tried at T 0.2, by what it is called."""
    return [
        (REST[last] + (", every position" if "cells=all" in name else ""), name)
        for name in methods
        if name.startswith("evidence T=0.2") and (last := name.split()[-1]) in REST
    ]


def name_of(name: str) -> str:
    """Return what a method is called on the page."""
    if name in MEANING:
        return MEANING[name]
    kind, temperature, *rest = name.replace("random states", "random").split()
    temperature = temperature.replace("=", " ")
    if kind in ("explain", "alone"):
        chosen = "as it comes" if name == PRODUCT else "each prediction alone"
        return f"**`explain`** from cells on disk, {temperature}, {chosen}"
    if kind == "random":
        return f"control: random states as prototypes, {temperature}"
    where = {"cells=16": "16 cells", "cells=all": "every position"} | REST
    return f"evidence by position, {temperature}, {', '.join(where.get(p, p) for p in rest)}"
