"""What the answers to multiple-choice questions come to: accuracies beside chance, and changes.

    change = 100 · (a − a_plain) / a_plain,   in %

Standard errors are those of a mean over questions, s / √n. That of a change is of the mean of
differences question by question, over a_plain: the same questions are asked of all predictors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

BAND = 5.0  # per cent round the plain predictor: what PRISM's document calls as good
HEADLINE = "acc"


class Answers(TypedDict):
    """The answers to one task, as they are kept.

    Attributes:
        task: lm-eval's name.
        of: how many questions the task has; fewer may have been asked.
        chosen: which of them were asked.
        gold: the right answer's number, one for each question.
        choices: how many answers there were to choose from.
        truncated: questions whose beginning the model could not read.
        correct: by predictor and metric, 0 or 1 for each question.
    """

    task: str
    of: int
    chosen: list[int]
    gold: list[int]
    choices: list[int]
    truncated: int
    correct: dict[str, dict[str, list[int]]]


def task_figures(answers: Answers) -> dict[str, Any]:
    """Return the figures of one task.

    ``chance`` is the mean of 1 / choices, and ``most_common`` the accuracy of whoever always gives
    the answer that is right most often. ``change`` is None where plain has nothing right.
    """
    asked = len(answers["gold"])
    predictors: dict[str, dict[str, Any]] = {}
    for predictor, metrics in answers["correct"].items():
        predictors[predictor] = {}
        for metric, correct in metrics.items():
            figure = {"value": float(np.mean(correct)), "stderr": _error(correct)}
            if predictor != "plain":
                plain = answers["correct"]["plain"][metric]
                error = _error(np.subtract(correct, plain))
                figure |= _change(figure["value"], float(np.mean(plain)), error)
            predictors[predictor][metric] = figure
    return {
        "task": answers["task"],
        "questions": asked,
        "of": answers["of"],
        "truncated": answers["truncated"],
        "chance": float(np.mean([1 / count for count in answers["choices"]])),
        "most_common": max(Counter(answers["gold"]).values()) / asked,
        "predictors": predictors,
    }


def mean_figures(tasks: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the mean accuracy over tasks, each counting alike, by predictor."""
    found: dict[str, dict[str, Any]] = {}
    for predictor in tasks[0]["predictors"]:
        figures = [task["predictors"][predictor][HEADLINE] for task in tasks]
        mean = float(np.mean([figure["value"] for figure in figures]))
        found[predictor] = {
            "value": mean,
            "stderr": _pooled([figure["stderr"] for figure in figures]),
        }
        if predictor != "plain":
            # Differences, since a change is relative to each task's own plain accuracy.
            plain = [task["predictors"]["plain"][HEADLINE]["value"] for task in tasks]
            errors = [
                None if figure["change_stderr"] is None else figure["change_stderr"] * base / 100
                for figure, base in zip(figures, plain, strict=True)
            ]
            found[predictor] |= _change(mean, float(np.mean(plain)), _pooled(errors))
    return found


def _change(value: float, base: float, error: float | None) -> dict[str, float | None]:
    return {
        "change": 100 * (value - base) / base if base else None,
        "change_stderr": 100 * error / base if base and error is not None else None,
    }


def _error(values: Any) -> float | None:
    """Return the standard error of a mean; None of a single value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _pooled(errors: list[float | None]) -> float | None:
    """Return the standard error of a mean of independent figures."""
    known = [error for error in errors if error is not None]
    return float(np.linalg.norm(known) / len(known)) if len(known) == len(errors) else None
