"""GLUE's official metrics by scikit-learn and SciPy, what a constant answer gets, and intervals.

All are from 0 or −1 to 1. Where all answers are alike, Matthews and both correlations are 0, and
F1, of class 1, is 0 without an answer 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr
from sklearn import metrics

from prismlm.eval.glue.tasks import HIGHEST, LOWEST, Task
from prismlm.statistics import Interval, interval_of, spearman


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
