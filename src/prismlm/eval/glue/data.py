"""The rows of GLUE's tasks, from a directory of Parquet files or from the hub.

``TASK_SPLIT.parquet`` holds a whole split, so that it has as many rows as GLUE; a file that is
called ``TASK_SPLIT_subset.parquet`` may stand in its place and is a share, which results state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from prismlm.errors import FormatError, InputError, shown
from prismlm.eval.benchmarks import drawn, read_columns
from prismlm.eval.glue.tasks import HIGHEST, LOWEST, Task
from prismlm.hub import fetching

HUB = "nyu-mll/glue"
HIDDEN = -1  # the hub's label where GLUE keeps it to itself


class Rows(NamedTuple):
    """Rows of a split.

    Attributes:
        texts: one or two sentences each.
        labels: numbers of classes, or scores; None where they are hidden.
        where: the files' names, or the hub's.
        there: how many rows these have.
    """

    texts: list[tuple[str, ...]]
    labels: list[float] | None
    where: str
    there: int

    def some(self, limit: int | None, seed: int) -> Rows:
        """Return rows with their labels that a seed draws."""
        chosen = drawn(len(self.texts), limit, seed)
        labels = None if self.labels is None else [self.labels[row] for row in chosen]
        return self._replace(texts=[self.texts[row] for row in chosen], labels=labels)


def read_split(task: Task, split: str, data: Path | None) -> Rows | None:
    """Return a split of a task, or None for a test or mismatched one that is not there.

    Args:
        task: the task.
        split: its name there.
        data: a directory of Parquet files; None for the hub.

    Raises:
        InputError: a file or the hub cannot be had.
        FormatError: a file is damaged or of another version, or a label is none of the task's.
    """
    found = _from_hub(task, split) if data is None else _from_directory(task, split, data)
    return None if found is None else _rows(task, split, *found)


def _from_directory(task: Task, split: str, data: Path) -> tuple[pa.Table, str] | None:
    if not data.is_dir():
        raise InputError(f"{data} is not a directory: expected Parquet files of GLUE in it.")
    files = [data / f"{stem}.parquet" for stem in task.splits[split].stems]
    missing = [path.name for path in files if not path.is_file()]
    share, where = data / f"{task.name}_{split}_subset.parquet", " and ".join(p.name for p in files)
    if missing and len(missing) < len(files):
        raise InputError(
            f"{data} has no {', '.join(missing)}, which belongs to GLUE's {split} set of "
            f"{task.title}. Put it beside {files[0].name}."
        )
    if missing and not share.is_file() and split in ("train", "dev"):
        raise InputError(
            f"{data} has neither {where} nor {share.name}, which {task.title} needs. Put them "
            "there, leave the task out with --tasks, or leave --data out to read from the hub."
        )
    if missing:
        return (_read(task, share), share.name) if share.is_file() else None
    table = pa.concat_tables([_read(task, path) for path in files])
    expected = task.splits[split].rows
    if len(table) != expected:
        raise FormatError(
            f"{where} in {data}: {len(table):,} rows, where GLUE has {expected:,}, so they are of "
            f"another version. Take GLUE's own, or call a share of it {share.name}."
        )
    return table, where


def _read(task: Task, path: Path) -> pa.Table:
    table = read_columns(path, task.columns, f"{', '.join(task.columns)} and label")
    # Files of STS-B call it a score. What else they hold, such as ids, may differ between them.
    names = [n for n in (*task.columns, "label", "score") if n in table.column_names]
    return table.select(names).rename_columns([n.replace("score", "label") for n in names])


def _from_hub(task: Task, split: str) -> tuple[pa.Table, str]:
    from datasets import load_dataset

    with fetching(f"the {split} set of {task.title}", "a directory of Parquet files"):
        rows: Any = load_dataset(HUB, task.name, split=task.splits[split].hub)
    return rows.with_format("arrow")[:], f"{HUB} {task.name} {task.splits[split].hub}"


def _rows(task: Task, split: str, table: pa.Table, where: str) -> Rows:
    texts = list(zip(*(table[name].to_pylist() for name in task.columns), strict=True))
    for number, row in enumerate(texts):
        if not all(isinstance(text, str) for text in row):
            raise FormatError(f"row {number} of {where} is {shown(row)}: expected text.")
    given = table["label"].to_pylist() if "label" in table.column_names else None
    hidden = given is None or all(label == HIDDEN for label in given)
    if hidden and not split.startswith("test"):
        raise FormatError(f"{where} has no labels: expected a column label.")
    if given is None or hidden:
        return Rows(texts, None, where, len(texts))
    labels = [_label(task, label, f"row {row} of {where}") for row, label in enumerate(given)]
    return Rows(texts, labels, where, len(texts))


def _label(task: Task, value: Any, where: str) -> float:
    """Return a class's number, from that or from its name, or a score."""
    if isinstance(value, str) and value in task.labels:
        return task.labels.index(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        whole = isinstance(value, int) and 0 <= value < len(task.labels)
        if whole or (not task.labels and LOWEST <= value <= HIGHEST):
            return value
    expected = f"{LOWEST:g} to {HIGHEST:g}"
    if task.labels:
        expected = f"{' or '.join(task.labels)}, or its number from 0 to {len(task.labels) - 1}"
    raise FormatError(f"{where} has the label {shown(value)}: {task.title} has {expected}.")
