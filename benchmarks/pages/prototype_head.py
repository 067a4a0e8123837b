"""Runs of the prototype head by method and seed, with intervals over seeds, for its page."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from benchmarks.shared.over_seeds import interval

Run = dict[str, Any]
WHAT = {
    "default": "**default**: detached, placed half way, a quarter, KL over 1,024 tokens, RES × 1",
    "default-third": "on a third, KL over the whole vocabulary, RES × 0.1",
    "default-all": "the same on every position",
    "default-quarter": "the same on a quarter",
    "default-eighth": "on an eighth",
    "default-early": "on a quarter, placed at step 200",
    "default-sampled": "on a quarter, placed on random states",
    "default-ce": "on a quarter, labels instead of the model's prediction",
    "detached": "the source's losses × 0.1, detached",
    "light": "the source's losses × 0.1, into the model",
    "light-kl": "the same with the KL",
    "constant": "the source's losses × 0.1, constant",
    "warmed-up": "the source's losses, placed, rising to 1",
    "source": "the source's losses from step 0, random prototypes",
    "source-literal": "the same, read literally",
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the runs of every method, and functions over them."""
    runs = [run for run in read("prototype_head/*.json") if "quality" in run]
    methods = {
        name: [run for run in runs if run["kind"] == "method" and run["name"] == name]
        for name in WHAT
    }
    detached = {name for name, group in methods.items() if group[0]["settings"]["head"]["detach"]}
    # Detached runs have bit for bit the plain model; the default's were made later, on another
    # processor.
    plain = {seed(r): r["quality"]["ce"] for name in detached - {"default"} for r in methods[name]}

    def over_plain(group: list[Run], key: str, of: str = "quality") -> list[float]:
        """Return how far cross-entropies are above the plain model's of the same seed, in %."""
        baselines = [
            run["quality"]["ce"] if run["name"] == "default" else plain[seed(run)] for run in group
        ]
        return [100 * (run[of][key] / ce - 1) for run, ce in zip(group, baselines, strict=True)]

    sampled: dict[tuple[float, float], str] = {}
    for run in runs:
        if run["kind"] == "sampled" and seed(run) == 0:
            losses = run["settings"]["losses"]
            sampled[min(4096, losses["kl_tokens"]), losses["residual"]] = above(run, "quality")
    sizes = [run for run in runs if run["kind"] == "size"]
    same = [run for run in methods["default-third"] if seed(run) == seed(sizes[0])]
    times = read("prototype_head/step-time-*.json")
    default = methods["default"][0]
    share = 1 - default["settings"]["head"]["initialise_at_step"] / default["settings"]["steps"]
    return {
        "methods": methods,
        "what": WHAT,
        "detached": detached,
        "plain": list(plain.values()),
        "over_plain": over_plain,
        "alone": lambda name: f"{fmean(over_plain(methods[name], 'prototype_only_ce')):.2f} %",
        "sweep": sorted((run for run in runs if run["kind"] == "sweep"), key=_shape),
        "sizes": sorted([*sizes, *same], key=lambda run: run["parameters"]),
        "times": [(time, time["recipes"]["default"]) for time in times],
        # The head takes part in some of the steps.
        "over_the_run": 1 + share * (times[0]["recipes"]["default"]["ratio"] - 1),
        "compiled": read("prototype_head/compiled-*.json"),
        "values": lambda group, key, of="quality": [run[of][key] for run in group],
        "mean": mean,
        "above": above,
        "sampled": sampled,
        "gpu": read("prototype_head_gpu/step-time-gpt2-small-16.json"),
    }


def above(run: Run, of: str) -> str:
    """Return how far prototypes alone, or the control, are above the plain model, in %."""
    return f"{100 * (run[of]['prototype_only_ce'] / run['quality']['ce'] - 1):.2f}"


def mean(values: list[float], digits: int, unit: str = "") -> str:
    """Return the mean, with half the width of Student's 95 % interval for more than one seed."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}{unit}"
    return f"{fmean(values):.{digits}f} ± {interval(values)[1] - fmean(values):.{digits}f}{unit}"


def seed(run: Run) -> int:
    """Return a run's seed."""
    return run["settings"]["seed"]


def _shape(run: Run) -> tuple[bool, int, int]:
    head = run["settings"]["head"]
    k = head["prototypes_per_token"]
    return k != 16, head["prototypes"], k
