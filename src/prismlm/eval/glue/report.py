"""What the runs of a directory come to: official metrics over seeds, beside their controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prismlm.eval.glue.metrics import constant, interval, measure
from prismlm.eval.glue.tasks import Task, tasks_of
from prismlm.files import check_json, read_json

RUNS = "runs"
# Of a kept run, what figures are made of.
SET = {"where": str, "rows": int, "there": int, "of": int}
RUN: dict[str, Any] = {"task": str, "seed": int, "from_scratch": bool, "cut": int, "train": SET}
RUN["measured"] = {"dev": SET | {"gold": list[float], "given": list[float]}}


def figures(place: Path) -> list[dict[str, Any]]:
    """Return what the runs of a directory come to, by task and set that was measured.

    Raises:
        FormatError: a file is not what a run writes.
    """
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
    row = {"task": task.name, "title": task.splits[split].title, "split": split, "metrics": {}}
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
    row["metrics"] = list(task.metrics)
    row["constant"] = {metric: constant(metric, gold) for metric in task.metrics}
    return row
