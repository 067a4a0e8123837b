"""GLUE's official metrics, of many resamples [..., N] at once.

From 0 or −1 to 1. Where all answers are alike, Matthews and both correlations are 0, and F1, of
class 1, is 0 without an answer 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prismlm.eval.glue.data import MAX_SCORE, MIN_SCORE, Task
from prismlm.statistics import Interval, interval_of, spearman


def answers(task: Task, outputs: np.ndarray) -> np.ndarray:
    """Return what a classifier's outputs [N, C] say: a class each, or a score within 0 to 5."""
    return outputs.argmax(-1) if task.labels else outputs[:, 0].clip(MIN_SCORE, MAX_SCORE)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros(np.shape(below)), where=below > 0)


def _pearson(gold: np.ndarray, given: np.ndarray) -> np.ndarray:
    g, p = (values - values.mean(-1, keepdims=True) for values in (gold, given))
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
    figure, whole = METRICS[metric], gold.astype(float)
    seeds = [answers.astype(float) for answers in given]
    return interval_of(
        lambda rows: np.mean([figure(whole[rows], seed[rows]) for seed in seeds], axis=0), len(gold)
    )
