"""What the runs of a directory come to: GLUE's official metrics over seeds, beside their controls.

Metrics, by scikit-learn and SciPy, are from 0 or −1 to 1. Where all answers are alike, Matthews
and both correlations are 0, and F1, of class 1, is 0 without an answer 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import pearsonr
from sklearn import metrics

from prismlm.eval.glue.data import HIGHEST, LOWEST, Task, tasks_of
from prismlm.files import check_json, read_json
from prismlm.statistics import Interval, interval_of, spearman

RUNS = "runs"
# Of a kept run, what figures are made of.
SET = {"where": str, "rows": int, "there": int, "of": int}
RUN: dict[str, Any] = {"task": str, "seed": int, "from_scratch": bool, "cut": int, "train": SET}
RUN["measured"] = {"dev": SET | {"gold": list[float], "given": list[float]}}


def answers(task: Task, outputs: np.ndarray) -> np.ndarray:
    """Return what a classifier's outputs [N, C] say: a class each, or a score within 0 to 5."""
    return outputs.argmax(-1) if task.labels else outputs[:, 0].clip(LOWEST, HIGHEST)


def _pearson(gold: np.ndarray, given: np.ndarray) -> float:
    if not (np.ptp(gold) and np.ptp(given)):
        return 0.0
    found: Any = pearsonr(gold, given)
    return found.statistic


_METRICS: Any = metrics  # its types know less than it takes
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _METRICS.accuracy_score,
    "f1": lambda gold, given: _METRICS.f1_score(gold, given, zero_division=0),
    "matthews": _METRICS.matthews_corrcoef,
    "pearson": _pearson,
    "spearman": lambda gold, given: spearman(gold, given).rho,
}


def measure(task: Task, gold: np.ndarray, given: np.ndarray) -> dict[str, float]:
    """Return the official metrics of a task's answers."""
    return {name: float(METRICS[name](gold, given)) for name in task.metrics}


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
    figure = _RESAMPLED[metric]
    both = [(gold.astype(float), one.astype(float)) for one in given]
    return interval_of(
        lambda rows: np.mean([figure(g[rows], p[rows]) for g, p in both], axis=0), len(gold)
    )


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros(np.shape(below)), where=below > 0)


def _correlations(gold: np.ndarray, given: np.ndarray) -> np.ndarray:
    g, p = (one - one.mean(-1, keepdims=True) for one in (gold, given))
    return _ratio((g * p).sum(-1), np.sqrt((g * g).sum(-1) * (p * p).sum(-1)))


# Of many resamples at once, [..., N] to [...]; Matthews is Pearson's correlation of 0 and 1.
_RESAMPLED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "accuracy": lambda gold, given: (gold == given).mean(-1),
    "f1": lambda gold, given: _ratio(2 * (gold * given).sum(-1), (gold + given).sum(-1)),
    "matthews": _correlations,
    "pearson": _correlations,
}


def figures(place: Path) -> list[dict[str, Any]]:
    """Return what the runs of a directory come to, by task and set that was measured."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((place / RUNS).glob("*.json")):
        run = read_json(path)
        check_json(run, RUN, str(path))
        runs.setdefault(run["task"], []).append(run)
    return [
        _figure(task, split, runs[task.name])
        for task in tasks_of()
        if task.name in runs
        for split in task.splits
        if split in runs[task.name][0]["measured"]
    ]


def _figure(task: Task, split: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    kept = {key: runs[0]["measured"][split][key] for key in ("where", "rows", "there", "of")}
    arms = {False: "fine_tuned", True: "from_scratch"}
    gold = np.array(runs[0]["measured"][split]["gold"])
    row: dict[str, Any] = {"task": task.name, "title": task.splits[split].title, "split": split}
    row["metrics"] = list(task.metrics)
    row |= {"measured": kept, "train": runs[0]["train"], "cut": runs[0]["cut"]}
    for arm, name in arms.items():
        given = {
            run["seed"]: np.array(run["measured"][split]["given"])
            for run in sorted(runs, key=lambda run: run["seed"])
            if run["from_scratch"] == arm
        }
        row[name] = None
        if given:
            found = [measure(task, gold, one) for one in given.values()]
            spread = interval(task.metrics[0], gold, list(given.values()))
            row[name] = {
                "seeds": list(given),
                "values": {metric: [one[metric] for one in found] for metric in task.metrics},
                "mean": {m: float(np.mean([one[m] for one in found])) for m in task.metrics},
                "low": spread.low,
                "high": spread.high,
            }
    row["constant"] = {metric: constant(metric, gold) for metric in task.metrics}
    return row
