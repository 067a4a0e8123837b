"""What the answers to multiple-choice questions come to: accuracies beside chance, and changes.

    change = 100 · (a − a_plain) / a_plain,   in %

Standard errors are those of a mean over questions, s / √n. That of a change is of the mean of
differences question by question, over a_plain: the same questions are asked of all predictors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypedDict, cast

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
    plain = answers["correct"]["plain"]
    predictors: dict[str, dict[str, Any]] = {}
    for predictor, metrics in answers["correct"].items():
        predictors[predictor] = {
            metric: _figure(correct, plain[metric], is_plain=predictor == "plain")
            for metric, correct in metrics.items()
        }
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
        found[predictor] = {
            "value": float(np.mean([figure["value"] for figure in figures])),
            "stderr": _pooled([figure["stderr"] for figure in figures]),
        }
    plain = found["plain"]["value"]
    for predictor, figure in found.items():
        if predictor != "plain":
            # Differences, since a change is relative to each task's own plain accuracy.
            errors = [
                None
                if (one := task["predictors"][predictor][HEADLINE])["change_stderr"] is None
                else one["change_stderr"] * task["predictors"]["plain"][HEADLINE]["value"] / 100
                for task in tasks
            ]
            figure |= _change(figure["value"], plain, _pooled(errors))
    return found


def _figure(correct: list[int], plain: list[int], *, is_plain: bool) -> dict[str, Any]:
    value, base = float(np.mean(correct)), float(np.mean(plain))
    figure: dict[str, Any] = {"value": value, "stderr": _error(correct)}
    if not is_plain:
        figure |= _change(value, base, _error(np.subtract(correct, plain)))
    return figure


def _change(value: float, base: float, error: float | None) -> dict[str, float | None]:
    return {
        "change": 100 * (value - base) / base if base else None,
        "change_stderr": 100 * error / base if base and error is not None else None,
    }


def _error(values: Any) -> float | None:
    """Return the standard error of a mean; None of a single value."""
    found = np.asarray(values, dtype=np.float64)
    return float(found.std(ddof=1) / np.sqrt(len(found))) if len(found) > 1 else None


def _pooled(errors: list[float | None]) -> float | None:
    """Return the standard error of a mean of independent figures."""
    if any(error is None for error in errors):
        return None
    return float(np.sqrt(np.square(cast("list[float]", errors)).sum()) / len(errors))
