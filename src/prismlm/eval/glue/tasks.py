"""The nine tasks of GLUE: sentences, labels, official metrics, splits, and the server's files.

Sources: Wang et al. (2018); of which metric a table shows, ProtoT, A.4 and Table 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prismlm.errors import check_choice

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
    """Return all tasks, or some, in the order of the source's tables.

    Raises:
        InputError: no such task.
    """
    known = [task.name for task in TASKS]
    for name in names or ():
        check_choice("a task of GLUE (MNLI-MM is measured with mnli)", name, known)
    return tuple(task for task in TASKS if not names or task.name in names)
