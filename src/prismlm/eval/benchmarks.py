"""The eight tasks of PRISM's figure as lm-eval defines them, over documents of the hub or of files.

Prompts, choices and metrics are those of the task files that lm-eval ships, in both cases. Local
rows only become documents of the form that those files expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.errors import FormatError, InputError, check_choice
from prismlm.hub import fetching

Row = dict[str, Any]
QUESTION = ("question", "choices", "label")
LETTERS = "ABCDEFGHIJ"
# What HellaSwag calls ctx_b, the beginning of a sentence, comes after the last whole sentence.
BEGUN_SENTENCE = re.compile(r"(.*[.!?]['\")]* |[^:]*: )([^.!?]*)", re.DOTALL)


def _lettered(row: Row, question: str = "question") -> Row:
    letters = list(LETTERS[: len(row["choices"])])
    choices = {"text": row["choices"], "label": letters}
    return {question: row["question"], "choices": choices, "answerKey": LETTERS[row["label"]]}


def _boolq(row: Row) -> Row:
    # In SuperGLUE, which lm-eval reads, a passage begins with its title.
    passage = f"{row['title']} -- {row['passage']}"
    return {"passage": passage, "question": row["question"], "label": row["label"]}


def _hellaswag(row: Row) -> Row:
    activity, _, context = row["ctx"].partition(": ")
    begun = BEGUN_SENTENCE.fullmatch(row["ctx"])
    ctx_b = begun[2] if begun is not None else ""
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
    """One of the tasks.

    Attributes:
        name: lm-eval's.
        title: the figure's.
        folder: of its definition among lm-eval's tasks.
        split: the one that is asked.
        part: what the file of its rows calls it, after the name.
        columns: that the files have.
        document: a row as lm-eval's definition expects it.
        examples: the split that examples come from; its file calls it so too.
        subjects: it is made of one lm-eval task for each value of the column ``subject``.
    """

    name: str
    title: str
    folder: str
    split: str
    part: str
    columns: tuple[str, ...]
    document: Callable[[Row], Row]
    examples: str = "train"
    subjects: bool = False


WINOGRANDE = ("sentence", "option1", "option2", "label")
SEED = (
    Benchmark("arc_challenge", "ARC-Challenge", "arc", "test", "test", QUESTION, _lettered),
    Benchmark("arc_easy", "ARC-Easy", "arc", "test", "test", QUESTION, _lettered),
    Benchmark(
        "boolq", "BoolQ", "super_glue/boolq", "validation", "dev",
        ("title", "passage", "question", "label"), _boolq,
    ),
    Benchmark(
        "hellaswag", "HellaSwag", "hellaswag", "validation", "val",
        ("ctx", "endings", "label"), _hellaswag,
    ),
    Benchmark(
        "mmlu", "MMLU", "mmlu/default", "test", "test", ("subject", *QUESTION), _mmlu,
        examples="dev", subjects=True,
    ),
    Benchmark(
        "openbookqa", "OpenBookQA", "openbookqa", "test", "test", QUESTION,
        partial(_lettered, question="question_stem"),
    ),
    Benchmark("piqa", "PIQA", "piqa", "validation", "valid", QUESTION, _piqa),
    Benchmark(
        "winogrande", "WinoGrande", "winogrande", "validation", "dev", WINOGRANDE, _winogrande
    ),
)  # fmt: skip
SUITES: dict[str, tuple[Benchmark, ...]] = {"seed": SEED}


def benchmarks_of(suite: str, names: Sequence[str] | None = None) -> tuple[Benchmark, ...]:
    """Return the tasks of a suite, or some of them, in the suite's order."""
    check_choice("the suite", suite, list(SUITES))
    known = [benchmark.name for benchmark in SUITES[suite]]
    for name in names or ():
        check_choice(f"a task of the suite {suite!r}", name, known)
    return tuple(item for item in SUITES[suite] if not names or item.name in names)


def load_tasks(
    benchmark: Benchmark, data: Path | None = None, *, shots: int = 0, seed: int = 0
) -> list[Any]:
    """Return lm-eval's tasks of a benchmark: one, or one for each subject.

    Args:
        benchmark: the task.
        data: a directory of Parquet files; None for the hub.
        shots: examples before each question.
        seed: of the choice of examples.

    """
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.tasks.__file__).parent / benchmark.folder
    manager = TaskManager(include_path=folder, include_defaults=False)
    prefix = f"{benchmark.name}_"
    names = [benchmark.name]
    if benchmark.subjects:
        names = [name for name in manager.all_subtasks if name.startswith(prefix)]
    splits = None if data is None else _read_splits(benchmark, data, shots)
    specs: list[Row] = []
    for name in names:
        subject = name.removeprefix(prefix) if benchmark.subjects else None
        local = {} if splits is None else _local(benchmark, splits, subject)
        specs.append({"task": name, "num_fewshot": shots} | local)
    fetched = fetching(f"the documents of {benchmark.name}", "a directory of Parquet files")
    with fetched if data is None else nullcontext():
        # A group is what takes its members' settings in place of those of their files.
        tasks = manager.load({"group": f"prismlm_{benchmark.name}", "task": specs})["tasks"]
    found = [tasks[name] for name in names]
    for task in found:
        task.set_fewshot_seed(seed)
    return found


def _local(benchmark: Benchmark, splits: dict[str, list[Row]], subject: str | None) -> Row:
    """Return what replaces lm-eval's dataset by documents that are there."""
    from datasets import Dataset, DatasetDict

    found: dict[Any, Any] = {}
    for split, rows in splits.items():
        kept = [row for row in rows if subject is None or row["subject"] == subject]
        if not kept:
            raise FormatError(f"the split {split} of {benchmark.name} has no rows of {subject!r}.")
        found[split] = Dataset.from_list([benchmark.document(row) for row in kept])
    split, examples = benchmark.split, benchmark.examples
    # A split that was not read must not be asked for; lm-eval's own names say what each is for.
    names: Row = dict.fromkeys(("training", "validation", "test", "fewshot"))
    names[split] = split
    if examples in splits:
        names["training" if examples == "train" else "fewshot"] = examples
    settings = {f"{name}_split": split for name, split in names.items()}
    return {"custom_dataset": lambda **_: DatasetDict(found), **settings}


def _read_splits(benchmark: Benchmark, data: Path, shots: int) -> dict[str, list[Row]]:
    if not data.is_dir():
        raise InputError(f"{data} is not a directory: expected Parquet files of the tasks in it.")
    asked = data / f"{benchmark.name}_{benchmark.part}.parquet"
    if not asked.is_file():
        raise InputError(
            f"{data} has no {asked.name}, which holds the questions of {benchmark.name}. Put it "
            "there, leave the task out with --tasks, or leave --data out to read from the hub."
        )
    splits = {benchmark.split: list(_rows(asked, benchmark))}
    examples = data / f"{benchmark.name}_{benchmark.examples}.parquet"
    if shots and not examples.is_file():
        raise InputError(
            f"{data} has no {examples.name}, which the {shots} examples before each question of "
            f"{benchmark.name} would come from. Put it there, or ask without examples: --shots 0."
        )
    if shots:
        splits[benchmark.examples] = list(_rows(examples, benchmark))
    return splits


def drawn(count: int, limit: int | None, seed: int) -> list[int]:
    """Return so many of ``count`` rows in their order; all without a limit."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:limit]).tolist()


def read_columns(path: Path, columns: Sequence[str], of: str) -> pa.Table:
    """Return a Parquet file that has rows of the columns named, and others."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"{path} cannot be read as Parquet: {error}.") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing or not len(table):
        raise FormatError(
            f"{path} has {len(table):,} rows of the columns {', '.join(table.column_names)}: "
            f"expected rows of {of}."
        )
    return table


def _rows(path: Path, benchmark: Benchmark) -> Iterator[Row]:
    table = read_columns(path, benchmark.columns, ", ".join(benchmark.columns))
    for number, row in enumerate(table.to_pylist()):
        answers = len(row.get("choices") or row.get("endings") or "no")
        if not isinstance(row["label"], int) or not 0 <= row["label"] < answers:
            raise FormatError(
                f"row {number} of {path} has the label {row['label']!r}: expected the number of "
                f"the right answer, 0 to {answers - 1}."
            )
        yield row
