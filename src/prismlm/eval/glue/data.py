"""The nine tasks of GLUE and their rows, from a directory of Parquet files or from the hub.

``TASK_SPLIT.parquet`` holds a split, or ``TASK_SPLIT_subset.parquet`` a part of it.

Sources: Wang et al. (2018); for the metric of a table, ProtoT, A.4 and Table 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from prismlm.errors import FormatError, InputError, check_choice, shown
from prismlm.eval.benchmarks import read_columns
from prismlm.hub import fetching

HUB = "nyu-mll/glue"
HIDDEN = -1  # the hub's label of a test row
MIN_SCORE, MAX_SCORE = 0.0, 5.0  # of STS-B


class Split(NamedTuple):
    """A split of a task: its files, its name on the hub, and its title in tables."""

    files: tuple[str, ...]
    hub: str
    title: str


@dataclass(frozen=True)
class Task:
    """One of the tasks.

    Attributes:
        title: the source's; in lower case, the name on the command line and on the hub.
        columns: its sentences, one or two.
        labels: their names by number, as on the server; empty for a score from 0 to 5.
        metrics: the official ones; a table shows the first.
        other_splits: splits with other names than TASK_train, TASK_dev and TASK_test.
    """

    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    other_splits: dict[str, Split] = field(default_factory=dict[str, Split])

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.title.lower().replace("-", "")

    @property
    def splits(self) -> dict[str, Split]:
        """The splits by name: dev splits are measured, test splits predicted."""
        hub = {"train": "train", "dev": "validation", "test": "test"}
        default = {k: Split((f"{self.name}_{k}",), name, self.title) for k, name in hub.items()}
        return default | self.other_splits


ONE, TWO = ("sentence",), ("sentence1", "sentence2")
BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
# CoLA's out-of-domain sentences have their own file; GLUE's dev set includes them.
COLA = {"dev": Split(("cola_dev", "cola_dev_ood"), "validation", "CoLA")}
MNLI = {
    "dev": Split(("mnli_dev_matched",), "validation_matched", "MNLI"),
    "dev_mismatched": Split(("mnli_dev_mismatched",), "validation_mismatched", "MNLI-MM"),
    "test": Split(("mnli_test_matched",), "test_matched", "MNLI-m"),
    "test_mismatched": Split(("mnli_test_mismatched",), "test_mismatched", "MNLI-mm"),
}
NLI = ("entailment", "neutral", "contradiction")
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
"""In the order of the source's tables."""


def tasks_of(names: Sequence[str] | None = None) -> tuple[Task, ...]:
    """Return all tasks, or some, in the order of the source's tables."""
    known = [task.name for task in TASKS]
    for name in names or ():
        check_choice("a task of GLUE (MNLI-MM is measured with mnli)", name, known)
    return tuple(task for task in TASKS if not names or task.name in names)


class Rows(NamedTuple):
    """Rows of a split.

    Attributes:
        texts: one or two sentences each.
        labels: class numbers, or scores; None if hidden.
        where: the names of the files, or of the set on the hub.
    """

    texts: list[tuple[str, ...]]
    labels: list[float] | None
    where: str


def read_split(task: Task, split: str, data: Path | None) -> Rows | None:
    """Return a split of a task, or None for a missing test or mismatched one.

    Args:
        task: the task.
        split: its name.
        data: a directory of Parquet files; None for the hub.

    Raises:
        InputError: a file is missing, or the hub cannot be reached.
        FormatError: a damaged file, a missing text, or an unknown label.
    """
    table, where = _from_hub(task, split) if data is None else _from_directory(task, split, data)
    if table is None:
        return None
    texts = list(zip(*(table[name].to_pylist() for name in task.columns), strict=True))
    for number, row in enumerate(texts):
        if not all(isinstance(text, str) for text in row):
            raise FormatError(f"row {number} of {where} is {shown(row)}: expected text.")
    labels = table["label"].to_pylist() if "label" in table.column_names else []
    if all(label == HIDDEN for label in labels):
        if not split.startswith("test"):
            raise FormatError(f"{where} has no labels: expected a column label.")
        return Rows(texts, None, where)
    numbers = [_label(task, label, f"row {row} of {where}") for row, label in enumerate(labels)]
    return Rows(texts, numbers, where)


def _from_directory(task: Task, split: str, data: Path) -> tuple[pa.Table | None, str]:
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
    where = " and ".join(path.name for path in files)
    if missing and files != [subset]:
        return None, where
    tables: list[pa.Table] = []
    for path in files:
        table = read_columns(path, task.columns, f"{', '.join(task.columns)} and label")
        # Files of STS-B call the label a score.
        names = [name for name in (*task.columns, "label", "score") if name in table.column_names]
        tables.append(table.select(names).rename_columns([*task.columns, "label"][: len(names)]))
    return pa.concat_tables(tables), where


def _from_hub(task: Task, split: str) -> tuple[pa.Table, str]:
    from datasets import load_dataset

    with fetching(f"the {split} set of {task.title}", "a directory of Parquet files"):
        rows: Any = load_dataset(HUB, task.name, split=task.splits[split].hub)
    return rows.with_format("arrow")[:], f"{HUB} {task.name} {task.splits[split].hub}"


def _label(task: Task, value: Any, where: str) -> float:
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
    raise FormatError(f"{where} has the label {shown(value)}: {task.title} has {expected}.")
