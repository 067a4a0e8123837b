"""PRISM's eight tasks as lm-eval defines them, with documents from the hub or from files.

Rows of files are converted to the documents that lm-eval's task files expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prismlm.errors import FormatError, InputError, check_choice
from prismlm.eval.runs import read_columns
from prismlm.hub import fetching

Row = dict[str, Any]
LETTERS = "ABCDEFGHIJ"
# HellaSwag's ctx_b is the incomplete sentence after the last complete one.
INCOMPLETE_SENTENCE = re.compile(r"(.*[.!?]['\")]* |[^:]*: )([^.!?]*)", re.DOTALL)


def _lettered(row: Row, question: str = "question") -> Row:
    choices = {"text": row["choices"], "label": list(LETTERS[: len(row["choices"])])}
    return {question: row["question"], "choices": choices, "answerKey": LETTERS[row["label"]]}


def _boolq(row: Row) -> Row:
    # As in SuperGLUE, the source of lm-eval.
    passage = f"{row['title']} -- {row['passage']}"
    return {"passage": passage, "question": row["question"], "label": row["label"]}


def _hellaswag(row: Row) -> Row:
    activity, _, context = row["ctx"].partition(": ")
    match = INCOMPLETE_SENTENCE.fullmatch(row["ctx"])
    ctx_b = "" if match is None else match[2]
    ctx_a = context[: len(context) - len(ctx_b)].rstrip(" ")
    document = {"activity_label": activity, "ctx_a": ctx_a, "ctx_b": ctx_b}
    return document | {"endings": row["endings"], "label": str(row["label"])}


def _mmlu(row: Row) -> Row:
    return {"question": row["question"], "choices": row["choices"], "answer": row["label"]}


def _piqa(row: Row) -> Row:
    first, second = row["choices"]
    return {"goal": row["question"], "sol1": first, "sol2": second, "label": row["label"]}


def _winogrande(row: Row) -> Row:
    texts = {name: row[name] for name in ("sentence", "option1", "option2")}
    return texts | {"answer": str(row["label"] + 1)}


class Benchmark(NamedTuple):
    """A task. lm-eval has a separate one for each value of a column ``subject``."""

    name: str  # in lm-eval
    title: str  # in PRISM's figure
    folder: str  # of lm-eval's definition
    split: str  # of the questions
    file: str  # suffix of the local file's name
    columns: tuple[str, ...]  # of the local file
    document: Callable[[Row], Row]  # converts a local row to lm-eval's document
    examples: str = "train"  # split and file suffix of few-shot examples


QUESTION = ("question", "choices", "label")
BOOLQ = ("title", "passage", "question", "label")
OPTIONS = ("sentence", "option1", "option2", "label")
OPENBOOK = partial(_lettered, question="question_stem")
SEED = (
    Benchmark("arc_challenge", "ARC-Challenge", "arc", "test", "test", QUESTION, _lettered),
    Benchmark("arc_easy", "ARC-Easy", "arc", "test", "test", QUESTION, _lettered),
    Benchmark("boolq", "BoolQ", "super_glue/boolq", "validation", "dev", BOOLQ, _boolq),
    Benchmark(
        "hellaswag", "HellaSwag", "hellaswag", "validation", "val",
        ("ctx", "endings", "label"), _hellaswag,
    ),
    Benchmark(
        "mmlu", "MMLU", "mmlu/default", "test", "test", ("subject", *QUESTION), _mmlu, "dev"
    ),
    Benchmark("openbookqa", "OpenBookQA", "openbookqa", "test", "test", QUESTION, OPENBOOK),
    Benchmark("piqa", "PIQA", "piqa", "validation", "valid", QUESTION, _piqa),
    Benchmark("winogrande", "WinoGrande", "winogrande", "validation", "dev", OPTIONS, _winogrande),
)  # fmt: skip
SUITES: dict[str, tuple[Benchmark, ...]] = {"seed": SEED}


def select_benchmarks(suite: str, names: Sequence[str] | None = None) -> tuple[Benchmark, ...]:
    """Return all tasks of a suite, or the named ones, in the suite's order."""
    check_choice("the suite", suite, list(SUITES))
    known = [benchmark.name for benchmark in SUITES[suite]]
    for name in names or ():
        check_choice(f"a task of the suite {suite!r}", name, known)
    return tuple(item for item in SUITES[suite] if not names or item.name in names)


def load_tasks(
    benchmark: Benchmark, data: Path | None = None, *, shots: int = 0, seed: int = 0
) -> list[Any]:
    """Return lm-eval's tasks of a benchmark: one, or one for each subject.

    ``data`` is a directory of Parquet files, None for the hub; ``seed`` selects the examples.
    """
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.tasks.__file__).parent / benchmark.folder
    manager = TaskManager(include_path=folder, include_defaults=False)
    names, prefix = [benchmark.name], f"{benchmark.name}_"
    if "subject" in benchmark.columns:
        names = [name for name in manager.all_subtasks if name.startswith(prefix)]
    splits = {} if data is None else _read_splits(benchmark, data, shots)
    specs = [
        {"task": name, "num_fewshot": shots}
        | (_local_dataset(benchmark, splits, name.removeprefix(prefix)) if splits else {})
        for name in names
    ]
    fetch = fetching(f"the documents of {benchmark.name}", "a directory of Parquet files")
    with fetch if data is None else nullcontext():
        # Only members of a group can override the settings of their files.
        tasks = manager.load({"group": f"prismlm_{benchmark.name}", "task": specs})["tasks"]
    for name in names:
        tasks[name].set_fewshot_seed(seed)
    return [tasks[name] for name in names]


def _local_dataset(
    benchmark: Benchmark, splits: dict[str, list[Row]], subject: str
) -> dict[str, Any]:
    """Return settings that replace lm-eval's dataset by local documents."""
    from datasets import Dataset, DatasetDict

    documents: dict[Any, Any] = {}
    for split, rows in splits.items():
        by_subject = "subject" in benchmark.columns
        selected = [row for row in rows if not by_subject or row["subject"] == subject]
        if not selected:
            raise FormatError(f"the split {split} of {benchmark.name} has no rows of {subject!r}.")
        documents[split] = Dataset.from_list([benchmark.document(row) for row in selected])
    # None for a split without local rows, so that lm-eval does not read it.
    names: Row = dict.fromkeys(
        ("training_split", "validation_split", "test_split", "fewshot_split")
    )
    names[f"{benchmark.split}_split"] = benchmark.split
    if benchmark.examples in splits:
        use = "training_split" if benchmark.examples == "train" else "fewshot_split"
        names[use] = benchmark.examples
    return {"custom_dataset": lambda **_: DatasetDict(documents), **names}


def _read_splits(benchmark: Benchmark, data: Path, shots: int) -> dict[str, list[Row]]:
    if not data.is_dir():
        raise InputError(f"{data} is not a directory: expected Parquet files of the tasks in it.")
    questions = data / f"{benchmark.name}_{benchmark.file}.parquet"
    examples = data / f"{benchmark.name}_{benchmark.examples}.parquet"
    if not questions.is_file():
        raise InputError(
            f"{data} has no {questions.name}, which holds the questions of {benchmark.name}. Put "
            "it there, leave the task out with --tasks, or leave --data out to read from the hub."
        )
    if shots and not examples.is_file():
        raise InputError(
            f"{data} has no {examples.name}, which the {shots} examples before each question of "
            f"{benchmark.name} come from. Put it there, or ask without examples: --shots 0."
        )
    splits = {benchmark.split: questions} | ({benchmark.examples: examples} if shots else {})
    return {split: _read_rows(path, benchmark) for split, path in splits.items()}


def _read_rows(path: Path, benchmark: Benchmark) -> list[Row]:
    rows = read_columns(path, benchmark.columns, ", ".join(benchmark.columns)).to_pylist()
    for number, row in enumerate(rows):
        answers = len(row.get("choices") or row.get("endings") or "no")
        if not isinstance(row["label"], int) or not 0 <= row["label"] < answers:
            raise FormatError(
                f"row {number} of {path} has the label {row['label']!r}: expected the number of "
                f"the right answer, 0 to {answers - 1}."
            )
    return rows
