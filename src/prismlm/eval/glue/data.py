"""The nine tasks of GLUE and their rows, from a directory of Parquet files or from the hub.

``TASK_SPLIT.parquet`` holds a whole split, so that it has as many rows as GLUE; a file that is
called ``TASK_SPLIT_subset.parquet`` may stand in its place and is a share, which results state.

Sources: Wang et al. (2018); of which metric a table shows, ProtoT, A.4 and Table 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from prismlm.errors import FormatError, InputError, check_choice, shown
from prismlm.eval.benchmarks import drawn, read_columns
from prismlm.hub import fetching

HUB = "nyu-mll/glue"
HIDDEN = -1  # the hub's label where GLUE keeps it to itself
LOWEST, HIGHEST = 0.0, 5.0
"""The scores of STS-B."""
YES_NO = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
PAIR = ("sentence1", "sentence2")


class Split(NamedTuple):
    """A part of a task.

    Attributes:
        stems: names of its files in a directory, without their ending.
        hub: its name in the hub's data set.
        rows: how many GLUE has.
        title: of what is measured on it, or of the file that the server reads.
    """

    stems: tuple[str, ...]
    hub: str
    rows: int
    title: str


@dataclass(frozen=True)
class Task:
    """One of the tasks.

    Attributes:
        name: as it is asked for, and the hub's.
        title: the source's.
        columns: its sentences, one or two.
        labels: their names by number, as the server reads them; none for a score from 0 to 5.
        metrics: the official ones; a table shows the first.
        splits: by name; those that begin with ``dev`` are measured, with ``test`` predicted.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    splits: dict[str, Split]

    def splits_of(self, kind: str) -> dict[str, Split]:
        """Return the splits of a kind: train, dev or test."""
        return {name: split for name, split in self.splits.items() if name.startswith(kind)}

    @property
    def outputs(self) -> int:
        """How many figures a classifier gives for a row."""
        return len(self.labels) or 1


def _task(
    title: str,
    columns: tuple[str, ...],
    labels: tuple[str, ...],
    metrics: tuple[str, ...],
    rows: tuple[int, int, int],
) -> Task:
    name = title.lower().replace("-", "")
    parts = zip(("train", "dev", "test"), ("train", "validation", "test"), rows, strict=True)
    splits = {part: Split((f"{name}_{part}",), hub, n, title) for part, hub, n in parts}
    return Task(name, title, columns, labels, metrics, splits)


_COLA = _task("CoLA", ("sentence",), YES_NO, ("matthews",), (8551, 1043, 1063))
# CoLA's authors keep sentences from other sources apart; GLUE's dev set has both.
_COLA.splits["dev"] = _COLA.splits["dev"]._replace(stems=("cola_dev", "cola_dev_ood"))
_MNLI = _task("MNLI", ("premise", "hypothesis"), NLI, ("accuracy",), (392_702, 9815, 9796))
_MNLI.splits.update(
    dev=Split(("mnli_dev_matched",), "validation_matched", 9815, "MNLI"),
    dev_mismatched=Split(("mnli_dev_mismatched",), "validation_mismatched", 9832, "MNLI-MM"),
    test=Split(("mnli_test_matched",), "test_matched", 9796, "MNLI-m"),
    test_mismatched=Split(("mnli_test_mismatched",), "test_mismatched", 9847, "MNLI-mm"),
)
TASKS = (
    _COLA,
    _task("SST-2", ("sentence",), YES_NO, ("accuracy",), (67_349, 872, 1821)),
    _task("MRPC", PAIR, YES_NO, ("f1", "accuracy"), (3668, 408, 1725)),
    _task("STS-B", PAIR, (), ("pearson", "spearman"), (5749, 1500, 1379)),
    _task("RTE", PAIR, ENTAILMENT, ("accuracy",), (2490, 277, 3000)),
    _task("WNLI", PAIR, YES_NO, ("accuracy",), (635, 71, 146)),
    _task(
        "QQP", ("question1", "question2"), YES_NO, ("f1", "accuracy"), (363_846, 40_430, 390_965)
    ),
    _task("QNLI", ("question", "sentence"), ENTAILMENT, ("accuracy",), (104_743, 5463, 5463)),
    _MNLI,
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
    if found is None:
        return None
    table, where = found
    texts = list(zip(*(table[name].to_pylist() for name in task.columns), strict=True))
    for number, row in enumerate(texts):
        if not all(isinstance(text, str) for text in row):
            raise FormatError(f"row {number} of {where} is {shown(row)}: expected text.")
    given = table["label"].to_pylist() if "label" in table.column_names else []
    if all(label == HIDDEN for label in given):
        if not split.startswith("test"):
            raise FormatError(f"{where} has no labels: expected a column label.")
        return Rows(texts, None, where, len(texts))
    labels = [_label(task, label, f"row {row} of {where}") for row, label in enumerate(given)]
    return Rows(texts, labels, where, len(texts))


def _from_directory(task: Task, split: str, data: Path) -> tuple[pa.Table, str] | None:
    if not data.is_dir():
        raise InputError(f"{data} is not a directory: expected Parquet files of GLUE in it.")
    files = [data / f"{stem}.parquet" for stem in task.splits[split].stems]
    missing = [path.name for path in files if not path.is_file()]
    where, share = " and ".join(p.name for p in files), data / f"{task.name}_{split}_subset.parquet"
    if missing and share.is_file():
        return _read(task, share), share.name
    if missing and (len(missing) < len(files) or split in ("train", "dev")):
        raise InputError(
            f"{data} has no {' and no '.join(missing)}, which {task.title} needs, nor "
            f"{share.name}. Put it there, leave the task out with --tasks, or leave --data out to "
            "read from the hub."
        )
    if missing:
        return None
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


def _label(task: Task, value: Any, where: str) -> float:
    """Return a class's number, from that or from its name, or a score."""
    if isinstance(value, str) and value in task.labels:
        return task.labels.index(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        is_class = isinstance(value, int) and 0 <= value < len(task.labels)
        if is_class or (not task.labels and LOWEST <= value <= HIGHEST):
            return value
    names = f"{' or '.join(task.labels)}, or its number from 0 to {len(task.labels) - 1}"
    expected = names if task.labels else f"{LOWEST:g} to {HIGHEST:g}"
    raise FormatError(f"{where} has the label {shown(value)}: {task.title} has {expected}.")
