"""The nine tasks of GLUE (Wang et al. 2018) and their rows, from Parquet files or from the hub.

``TASK_SPLIT.parquet`` holds a split, or ``TASK_SPLIT_subset.parquet`` a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from prismlm.errors import FormatError, InputError, check_choice, shown
from prismlm.eval.runs import read_columns
from prismlm.hub import fetching

HUB = "nyu-mll/glue"
HIDDEN = -1  # the hub's label of a test row
MIN_SCORE, MAX_SCORE = 0.0, 5.0  # of STS-B


class Split(NamedTuple):
    """The files of a split, its name on the hub, and its title in tables."""

    files: tuple[str, ...]
    hub: str
    title: str


@dataclass(frozen=True, eq=False)
class Task:
    """A task: its sentence columns, class names, official metrics and irregular splits.

    Without class names, labels are scores from 0 to 5. Tables show the first metric.
    """

    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    other_splits: dict[str, Split] = field(default_factory=dict[str, Split])

    @property
    def name(self) -> str:
        """The name on the command line and on the hub."""
        return self.title.lower().replace("-", "")

    @property
    def splits(self) -> dict[str, Split]:
        """The splits by name: dev splits are scored, predictions are written for test splits."""
        hub = {"train": "train", "dev": "validation", "test": "test"}
        default = {k: Split((f"{self.name}_{k}",), name, self.title) for k, name in hub.items()}
        return default | self.other_splits


ONE, TWO = ("sentence",), ("sentence1", "sentence2")
BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
# GLUE's dev set of CoLA includes out-of-domain sentences, which come in their own file.
COLA = {"dev": Split(("cola_dev", "cola_dev_ood"), "validation", "CoLA")}
MNLI = {
    "dev": Split(("mnli_dev_matched",), "validation_matched", "MNLI"),
    "dev_mismatched": Split(("mnli_dev_mismatched",), "validation_mismatched", "MNLI-MM"),
    "test": Split(("mnli_test_matched",), "test_matched", "MNLI-m"),
    "test_mismatched": Split(("mnli_test_mismatched",), "test_mismatched", "MNLI-mm"),
}
NLI = ("entailment", "neutral", "contradiction")
# In the order of ProtoT's tables (A.4, Table 10), with the metrics of these.
TASKS = (
    Task("CoLA", ONE, BINARY, ("matthews",), COLA),
    Task("SST-2", ONE, BINARY, ("accuracy",)),
    Task("MRPC", TWO, BINARY, ("f1", "accuracy")),
    Task("STS-B", TWO, (), ("pearson", "spearman")),
    Task("RTE", TWO, ENTAILMENT, ("accuracy",)),
    Task("WNLI", TWO, BINARY, ("accuracy",)),
    Task("QQP", ("question1", "question2"), BINARY, ("f1", "accuracy")),
    Task("QNLI", ("question", "sentence"), ENTAILMENT, ("accuracy",)),
    Task("MNLI", ("premise", "hypothesis"), NLI, ("accuracy",), MNLI),
)


def select_tasks(names: Sequence[str] | None = None) -> tuple[Task, ...]:
    """Return all tasks, or the named ones, in the order of ProtoT's tables."""
    known = [task.name for task in TASKS]
    for name in names or ():
        check_choice("a task of GLUE (MNLI-MM is measured with mnli)", name, known)
    return tuple(task for task in TASKS if not names or task.name in names)


class Rows(NamedTuple):
    """Rows of a split, each one or two sentences, or their tokens; labels are None if hidden."""

    inputs: list[Any]
    labels: np.ndarray | None
    source: str


def read_split(task: Task, split: str, data: Path | None) -> Rows | None:
    """Return a split of a task, or None for a missing test or mismatched one.

    ``data`` is a directory of Parquet files; None for the hub.
    """
    table, source = _from_hub(task, split) if data is None else _from_files(task, split, data)
    if table is None:
        return None
    texts = list(zip(*(table[name].to_pylist() for name in task.columns), strict=True))
    for number, row in enumerate(texts):
        if not all(isinstance(text, str) for text in row):
            raise FormatError(f"row {number} of {source} is {shown(row)}: expected text.")
    labels = table["label"].to_pylist() if "label" in table.column_names else []
    if all(label == HIDDEN for label in labels):
        if not split.startswith("test"):
            raise FormatError(f"{source} has no labels: expected a column label.")
        return Rows(texts, None, source)
    numbers = [_label(task, label, f"row {row} of {source}") for row, label in enumerate(labels)]
    return Rows(texts, np.array(numbers), source)


def _from_files(task: Task, split: str, data: Path) -> tuple[pa.Table | None, str]:
    if not data.is_dir():
        raise InputError(f"{data} is not a directory: expected Parquet files of GLUE in it.")
    files = [data / f"{name}.parquet" for name in task.splits[split].files]
    subset = data / f"{task.name}_{split}_subset.parquet"
    missing = [path.name for path in files if not path.is_file()]
    if missing and subset.is_file():
        files = [subset]
    elif missing and (len(missing) < len(files) or split in ("train", "dev")):
        raise InputError(
            f"{data} has no {' and no '.join(missing)}, which {task.title} needs, nor "
            f"{subset.name}. Put it there, leave the task out with --tasks, or leave --data out "
            "to read from the hub."
        )
    source = " and ".join(path.name for path in files)
    if missing and files != [subset]:
        return None, source
    tables: list[pa.Table] = []
    for path in files:
        table = read_columns(path, task.columns, f"{', '.join(task.columns)} and label")
        # Files of STS-B call the label a score.
        names = [name for name in (*task.columns, "label", "score") if name in table.column_names]
        tables.append(table.select(names).rename_columns([*task.columns, "label"][: len(names)]))
    return pa.concat_tables(tables), source


def _from_hub(task: Task, split: str) -> tuple[pa.Table, str]:
    from datasets import load_dataset

    with fetching(f"the {split} set of {task.title}", "a directory of Parquet files"):
        rows: Any = load_dataset(HUB, task.name, split=task.splits[split].hub)
    return rows.with_format("arrow")[:], f"{HUB} {task.name} {task.splits[split].hub}"


def _label(task: Task, value: Any, row: str) -> float:
    """Return a class number, also from its name, or a score."""
    if not task.labels:
        if type(value) in (int, float) and MIN_SCORE <= value <= MAX_SCORE:
            return value
    elif value in task.labels:
        return task.labels.index(value)
    elif type(value) is int and 0 <= value < len(task.labels):
        return value
    names = f"{' or '.join(task.labels)}, or its number from 0 to {len(task.labels) - 1}"
    expected = names if task.labels else f"{MIN_SCORE:g} to {MAX_SCORE:g}"
    raise FormatError(f"{row} has the label {shown(value)}: {task.title} has {expected}.")
