"""Local Parquet files of the eight tasks, ``TASK_SPLIT.parquet``, as the documents of lm-eval."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prismlm.eval.runs import read_columns
from prismlm.eval.suite import Benchmark, Question

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


class File(NamedTuple):
    """The questions of a task."""

    split: str  # of lm-eval
    suffix: str  # of the file's name
    columns: tuple[str, ...]
    document: Callable[[Row], Row]  # converts a row to lm-eval's document


QUESTION = ("question", "choices", "label")
OPTIONS = ("sentence", "option1", "option2", "label")
FILES = {
    "arc_challenge": File("test", "test", QUESTION, _lettered),
    "arc_easy": File("test", "test", QUESTION, _lettered),
    "boolq": File("validation", "dev", ("title", "passage", "question", "label"), _boolq),
    "hellaswag": File("validation", "val", ("ctx", "endings", "label"), _hellaswag),
    "mmlu": File("test", "test", ("subject", *QUESTION), _mmlu),
    "openbookqa": File("test", "test", QUESTION, partial(_lettered, question="question_stem")),
    "piqa": File("validation", "valid", QUESTION, _piqa),
    "winogrande": File("validation", "dev", OPTIONS, _winogrande),
}


def documents(data: Path, suffix: str | None = None) -> Callable[[Benchmark, str], Row]:
    """Return what gives lm-eval the rows of ``data``, from files of a suffix or the usual."""

    def dataset(benchmark: Benchmark, subject: str) -> Row:
        from datasets import Dataset, DatasetDict

        file = FILES[benchmark.name]
        path = data / f"{benchmark.name}_{suffix or file.suffix}.parquet"
        rows = read_columns(path, file.columns).to_pylist()
        rows = [row for row in rows if benchmark.name != "mmlu" or row["subject"] == subject]
        asked = DatasetDict({file.split: Dataset.from_list([*map(file.document, rows)])})
        # None for a split without local rows, so that lm-eval does not read it.
        splits: Row = dict.fromkeys(
            ("training_split", "validation_split", "test_split", "fewshot_split")
        )
        return {"custom_dataset": lambda **_: asked} | splits | {f"{file.split}_split": file.split}

    return dataset


def right_answer(question: Question) -> int:
    """Return the number of the answer that lm-eval's task takes for right."""
    numbers = range(len(question.pairs))
    for best in numbers:
        results = [(-1.0 - (number != best), False) for number in numbers]
        if question.task.process_results(question.document, results)["acc"]:
            return best
    raise AssertionError("no answer is right")
