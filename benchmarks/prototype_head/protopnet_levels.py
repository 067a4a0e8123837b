"""From curves to ratios: when each variant of protopnet.py first reaches a perplexity."""

from __future__ import annotations

import math
from typing import Any

AXES = ("cpu_seconds", "wall_seconds", "tokens")
REFERENCES = ("prism", "through")
LEVELS = (500, 400, 350, 300, 250, 200, 175, 150, 130, 115, 100, 80, 60, 50, 40, 30, 20, 15)


def first_reach(curve: list[dict[str, float]], ce: float, axis: str) -> float | None:
    """Return where on ``axis`` a curve first falls to ``ce``, between points along a line.

    None if it never does.
    """
    before = curve[0]
    if before["ce"] <= ce:
        return before[axis]
    for point in curve[1:]:
        if point["ce"] <= ce:
            part = (before["ce"] - ce) / (before["ce"] - point["ce"])
            return before[axis] + part * (point[axis] - before[axis])
        before = point
    return None


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where each run reaches common perplexities, and the ratios to both references.

    The last level of a seed is the final perplexity of its slowest variant, which all reach;
    the others are the round numbers that every run of every seed passes after its first
    evaluation. Before it a line from the untrained model would only compare the costs of a step.
    """
    seeds = sorted({run["seed"] for run in runs})
    slowest = {
        seed: max((run for run in runs if run["seed"] == seed), key=lambda r: r["curve"][-1]["ce"])
        for seed in seeds
    }
    floor = max(math.exp(run["curve"][-1]["ce"]) for run in runs)
    ceiling = min(math.exp(run["curve"][1]["ce"]) for run in runs)
    rows = [
        _row(runs, str(level), dict.fromkeys(seeds, math.log(level)))
        for level in LEVELS
        if floor < level < ceiling
    ]
    finals = {seed: run["curve"][-1]["ce"] for seed, run in slowest.items()}
    rows.append(_row(runs, "slowest", finals))
    return {
        "slowest": {str(seed): run["variant"] for seed, run in slowest.items()},
        "slowest_perplexity": {str(seed): math.exp(ce) for seed, ce in finals.items()},
        "levels": rows,
    }


def _row(runs: list[dict[str, Any]], name: str, target: dict[int, float]) -> dict[str, Any]:
    """Return one level: by variant and axis the value of each seed and ratios to references."""
    reached: dict[str, dict[str, list[float | None]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        own = reached.setdefault(run["variant"], {axis: [] for axis in AXES})
        for axis in AXES:
            own[axis].append(first_reach(run["curve"], target[run["seed"]], axis))
    ratios = {
        reference: {
            variant: {axis: _ratio(own[axis], reached[reference][axis]) for axis in AXES}
            for variant, own in reached.items()
        }
        for reference in REFERENCES
    }
    return {"perplexity": name, "reached": reached, "ratio": ratios}


def _ratio(values: list[float | None], reference: list[float | None]) -> dict[str, float] | None:
    """Return the geometric mean over seeds of value / reference, with the range."""
    pairs = [(v, r) for v, r in zip(values, reference, strict=True) if v and r]
    if len(pairs) < len(values):
        return None
    ratios = [v / r for v, r in pairs]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {"mean": mean, "low": min(ratios), "high": max(ratios)}
