"""A suite of benchmarks on one model, task by task, with accuracies and chance levels.

    change = 100 · (a − a_plain) / a_plain,   in %

Standard errors are of a mean over questions; that of a change is of the paired differences over
a_plain, since all predictors answer the same questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from prismlm import fingerprints
from prismlm.errors import FormatError, check_whole
from prismlm.eval.benchmarks import Benchmark, load_tasks, select_benchmarks
from prismlm.eval.predictors import PredictorLM
from prismlm.eval.runs import make_parts, read_part, sample_rows
from prismlm.files import finite, keep_json
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

FORMAT_VERSION = 1
RESULT_FILE, TASKS = "eval.json", "tasks"
PACKAGES = ("prismlm", "lm_eval", "torch", "transformers", "tokenizers", "datasets")
BAND = 5.0  # per cent around the plain predictor, within which PRISM calls it equally good
HEADLINE = "acc"


@dataclass(frozen=True)
class SuiteOptions:
    """Settings of a suite."""

    suite: str = "seed"
    data: Path | None = None  # a directory of Parquet files; None for the hub
    limit: int | None = None  # questions per task, drawn by ``seed``; None for all
    seed: int = 0  # of drawn questions and examples
    shots: int = 0  # examples before each question

    def __post_init__(self) -> None:
        select_benchmarks(self.suite)
        check_whole("shots", self.shots)
        sample_rows(0, self.limit, self.seed)

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return asdict(self) | {"data": "hub" if self.data is None else str(self.data.resolve())}


class Question(NamedTuple):
    """One document, as lm-eval asks it."""

    number: int  # of the document
    task: Any  # lm-eval's, which scores the answers
    document: dict[str, Any]
    pairs: list[tuple[str, str]]  # (context, continuation) of each answer
    gold: int  # number of the right answer


def select_questions(benchmark: Benchmark, options: SuiteOptions) -> tuple[list[Question], int]:
    """Return the selected questions of a task, and the number of all.

    Questions of a task with subjects are drawn from all subjects together.
    """
    tasks = load_tasks(benchmark, options.data, shots=options.shots, seed=options.seed)
    rows = [(task, row) for task in tasks for row in range(len(task.task_docs))]
    chosen = sample_rows(len(rows), options.limit, options.seed)
    return [_question(number, *rows[number], options.shots) for number in chosen], len(rows)


def _question(number: int, task: Any, row: int, shots: int) -> Question:
    document = task.task_docs[row]
    choices = task.doc_to_choice(document)
    # Where the context contains the answers, as in WinoGrande, lm-eval exchanges text and target.
    try:
        gold = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
        gold = choices.index(gold) if isinstance(gold, str) else gold
    except (ValueError, LookupError):
        gold = -1
    if not 0 <= gold < len(choices):
        raise FormatError(
            f"question {row} of {task.task_name} has {len(choices)} answers, and its label is "
            "none of them: expected the number of the right answer."
        )
    context = task.fewshot_context(document, shots, gen_prefix=task.doc_to_prefix(document))
    requests = task.construct_requests(doc=document, ctx=context, metadata=(task.task_name, row, 1))
    return Question(number, task, document, [request.args for request in requests], gold)


def ask(
    lm: PredictorLM, benchmark: Benchmark, options: SuiteOptions, progress: Reporter
) -> dict[str, Any]:
    """Ask all predictors the questions of a task; lm-eval's task scores the answers.

    Of all questions, ``of``, the ``chosen`` ones are asked: ``gold`` is the number of the right
    answer, ``choices`` the number of answers, ``truncated`` how many questions were cut on the
    left, and ``correct`` 0 or 1 for each question, by predictor and metric.
    """
    questions, count = select_questions(benchmark, options)
    encoded = [[lm.encoded(*pair) for pair in question.pairs] for question in questions]
    flat = [pair for pairs in encoded for pair in pairs]
    with progress.task(benchmark.title, len(flat), "answers") as progress_task:
        scores = iter(lm.score(flat, progress_task.advance))
    correct: dict[str, dict[str, list[int]]] = {name: {} for name in lm.predictors}
    for question in questions:
        answers = [next(scores) for _ in question.pairs]
        for predictor, metrics in correct.items():
            results = [tuple(answer[cast("Any", predictor)]) for answer in answers]
            for metric, value in question.task.process_results(question.document, results).items():
                metrics.setdefault(metric, []).append(int(value))
    return {
        "task": benchmark.name,
        "of": count,
        "chosen": [question.number for question in questions],
        "gold": [question.gold for question in questions],
        "choices": [len(question.pairs) for question in questions],
        "truncated": sum(any(lm.truncated(*pair) for pair in pairs) for pairs in encoded),
        "correct": correct,
    }


def task_figures(answers: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one task from the result of :func:`ask`; NaN where undefined.

    ``chance`` is the mean of 1 / choices, and ``most_common`` the accuracy of always giving the
    most frequent right answer.
    """
    correct, questions = answers["correct"], len(answers["gold"])

    def figure(predictor: str, metric: str) -> dict[str, float]:
        right, plain = correct[predictor][metric], correct["plain"][metric]
        value = {"value": float(np.mean(right)), "stderr": _standard_error(right)}
        if predictor == "plain":
            return value
        error = _standard_error(np.subtract(right, plain))
        return value | _change(value["value"], float(np.mean(plain)), error)

    return {
        "task": answers["task"],
        "questions": questions,
        "of": answers["of"],
        "truncated": answers["truncated"],
        "chance": float(np.mean([1 / count for count in answers["choices"]])),
        "most_common": max(Counter(answers["gold"]).values()) / questions,
        "predictors": {
            predictor: {metric: figure(predictor, metric) for metric in metrics}
            for predictor, metrics in correct.items()
        },
    }


def mean_figures(tasks: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the mean accuracy over tasks, with equal weights, by predictor."""
    means: dict[str, dict[str, Any]] = {}
    plain = np.array([task["predictors"]["plain"][HEADLINE]["value"] for task in tasks])
    for predictor in tasks[0]["predictors"]:
        figures = [task["predictors"][predictor][HEADLINE] for task in tasks]
        value = float(np.mean([figure["value"] for figure in figures]))
        error = np.linalg.norm([figure["stderr"] for figure in figures]) / len(tasks)
        means[predictor] = {"value": value, "stderr": float(error)}
        if predictor != "plain":
            # The change of a task is relative to its own plain accuracy.
            errors = plain * [figure["change_stderr"] for figure in figures] / 100
            error = float(np.linalg.norm(errors) / len(tasks))
            means[predictor] |= _change(value, float(plain.mean()), error)
    return means


def _change(value: float, base: float, error: float) -> dict[str, float]:
    base = base or np.nan
    return {"change": 100 * (value - base) / base, "change_stderr": 100 * error / base}


def _standard_error(values: Any) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.nan


def run_suite(
    lm: PredictorLM,
    name: str,
    out: Path,
    options: SuiteOptions,
    tasks: Sequence[str] | None = None,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Ask the ``tasks`` that ``out`` lacks, and return the figures of all its tasks.

    ``out`` then holds ``run.json``, the answers of each task below ``tasks``, and the result in
    ``eval.json``. Model and options must be those that it was started with; ``name`` is the
    model's in the result.
    """
    head = None if lm.head is None else fingerprints.of_model(lm.head)
    identity = fingerprints.of_json([fingerprints.of_model(cast("Any", lm.model)), head])
    note = {"format_version": FORMAT_VERSION, "lm_eval": version("lm_eval"), "model": identity}
    parts = {
        benchmark.name: partial(ask, lm, benchmark, options, progress)
        for benchmark in select_benchmarks(options.suite, tasks)
    }
    with writing(out / RESULT_FILE):
        make_parts(out, TASKS, note | options.as_json(), parts)
        figures = [
            {"title": benchmark.title} | read_part(path, task_figures)
            for benchmark in select_benchmarks(options.suite)
            if (path := out / TASKS / f"{benchmark.name}.json").is_file()
        ]
        result = finite(
            {
                "model": name,
                **options.as_json(),
                "predictors": list(lm.predictors),
                "metric": HEADLINE,
                "band_percent": BAND,
                "tasks": figures,
                "mean": mean_figures(figures),
                "versions": {package: version(package) for package in PACKAGES},
            }
        )
        keep_json(out / RESULT_FILE, result)
    return result
