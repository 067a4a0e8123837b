"""What the runs of a directory come to: GLUE's official metrics over seeds, beside their controls.

Metrics are from 0 or −1 to 1, of many resamples [..., N] at once. Where all answers are alike,
Matthews and both correlations are 0, and F1, of class 1, is 0 without an answer 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prismlm.eval.glue.data import HIGHEST, LOWEST, Task, tasks_of
from prismlm.files import check_json, read_json
from prismlm.statistics import Interval, interval_of, spearman

RUNS = "runs"
ARMS = {"fine_tuned": False, "from_scratch": True}
# Of a kept run, what figures are made of.
RUN = {"task": str, "seed": int, "from_scratch": bool, "cut": int, "train": {"rows": int}}
MEASURED = {"where": str, "rows": int, "there": int, "of": int}
MEASURED |= {"gold": list[float], "given": list[float]}


def answers(task: Task, outputs: np.ndarray) -> np.ndarray:
    """Return what a classifier's outputs [N, C] say: a class each, or a score within 0 to 5."""
    return outputs.argmax(-1) if task.labels else outputs[:, 0].clip(LOWEST, HIGHEST)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros(np.shape(below)), where=below > 0)


def _pearson(gold: np.ndarray, given: np.ndarray) -> np.ndarray:
    g, p = (one - one.mean(-1, keepdims=True) for one in (gold, given))
    return _ratio((g * p).sum(-1), np.sqrt((g * g).sum(-1) * (p * p).sum(-1)))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "accuracy": lambda gold, given: (gold == given).mean(-1),
    "f1": lambda gold, given: _ratio(2 * (gold * given).sum(-1), (gold + given).sum(-1)),
    # Of two classes, 0 and 1, Matthews' is Pearson's correlation.
    "matthews": _pearson,
    "pearson": _pearson,
    "spearman": lambda gold, given: spearman(gold, given).rho,
}


def measure(task: Task, gold: np.ndarray, given: np.ndarray) -> dict[str, float]:
    """Return the official metrics of a task's answers."""
    both = gold.astype(float), given.astype(float)
    return {name: float(METRICS[name](*both)) for name in task.metrics}


def constant(metric: str, gold: np.ndarray) -> float:
    """Return the most that one answer to all rows gets: by accuracy the majority's share.

    F1 is best of always 1, whichever class has the majority; what correlates is 0.
    """
    if metric not in ("accuracy", "f1"):
        return 0.0
    return max(float(METRICS[metric](gold, np.full_like(gold, c))) for c in np.unique(gold))


def interval(metric: str, gold: np.ndarray, given: Sequence[np.ndarray]) -> Interval:
    """Return the mean of a metric over seeds with its 95 % interval over resampled dev rows.

    Every seed's answers are to the same rows [N]; a resample takes the same of all.
    """
    figure = METRICS[metric]
    both = [(gold.astype(float), one.astype(float)) for one in given]
    return interval_of(
        lambda rows: np.mean([figure(g[rows], p[rows]) for g, p in both], axis=0), len(gold)
    )


def figures(place: Path) -> list[dict[str, Any]]:
    """Return what the runs of a directory come to, by task and set that was measured."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((place / RUNS).glob("*.json")):
        run = read_json(path)
        check_json(run, RUN | {"measured": {"dev": MEASURED}}, str(path))
        for split, measured in run["measured"].items():
            check_json(measured, MEASURED, f"{path}: measured: {split}")
        runs.setdefault(run["task"], []).append(run)
    return [
        _figure(task, split, sorted(runs[task.name], key=lambda run: run["seed"]))
        for task in tasks_of()
        if task.name in runs
        for split in task.splits
        if split in runs[task.name][0]["measured"]
    ]


def _figure(task: Task, split: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    first = runs[0]["measured"][split]
    gold = np.array(first["gold"])
    row: dict[str, Any] = {
        "task": task.name,
        "title": task.splits[split].title,
        "split": split,
        "metrics": list(task.metrics),
        "measured": {key: first[key] for key in ("where", "rows", "there", "of")},
        "train": runs[0]["train"],
        "cut": runs[0]["cut"],
    }
    for arm, from_scratch in ARMS.items():
        own = [run for run in runs if run["from_scratch"] == from_scratch]
        row[arm] = None
        if own:
            given = [np.array(run["measured"][split]["given"]) for run in own]
            found = [measure(task, gold, one) for one in given]
            spread = interval(task.metrics[0], gold, given)
            row[arm] = {
                "seeds": [run["seed"] for run in own],
                "values": {metric: [one[metric] for one in found] for metric in task.metrics},
                "mean": {m: float(np.mean([one[m] for one in found])) for m in task.metrics},
                "low": spread.low,
                "high": spread.high,
            }
    row["constant"] = {metric: constant(metric, gold) for metric in task.metrics}
    return row
