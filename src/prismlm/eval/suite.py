"""PRISM's eight tasks as lm-eval defines them, asked of one model: accuracies and chance levels.

    change = 100 · (a − a_plain) / a_plain,   in %

Standard errors are of a mean over questions; that of a change is of the paired differences over
a_plain, since all predictors answer the same questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from prismlm import fingerprints
from prismlm.errors import FormatError, InputError, PrismError, check_choice, first_line, shown
from prismlm.eval.predictors import PredictorLM, WaysLM, quiet
from prismlm.eval.runs import run_study, sample_rows
from prismlm.files import finite, read_json
from prismlm.hub import fetching
from prismlm.interventions.suppression import Way
from prismlm.lens.opened_model import OpenedModel
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import NORMAL_QUANTILE, Interval
from prismlm.training.setup import versions

FORMAT_VERSION = 1
RESULT_FILE, TASKS = "eval.json", "tasks"
HEADLINE = "acc"
Row = dict[str, Any]
# Returns settings for the dataset of a benchmark's subject.
Dataset = Callable[["Benchmark", str], Row]


class Benchmark(NamedTuple):
    """A task of lm-eval."""

    name: str
    title: str  # in PRISM's figure
    folder: str  # of its definition
    hub: str  # its dataset on the hub


SEED = (
    Benchmark("arc_challenge", "ARC-Challenge", "arc", "allenai/ai2_arc"),
    Benchmark("arc_easy", "ARC-Easy", "arc", "allenai/ai2_arc"),
    Benchmark("boolq", "BoolQ", "super_glue/boolq", "aps/super_glue"),
    Benchmark("hellaswag", "HellaSwag", "hellaswag", "Rowan/hellaswag"),
    Benchmark("mmlu", "MMLU", "mmlu/default", "cais/mmlu"),
    Benchmark("openbookqa", "OpenBookQA", "openbookqa", "allenai/openbookqa"),
    Benchmark("piqa", "PIQA", "piqa", "baber/piqa"),
    Benchmark("winogrande", "WinoGrande", "winogrande", "allenai/winogrande"),
)
SUITES: dict[str, tuple[Benchmark, ...]] = {"seed": SEED}


def select_benchmarks(suite: str, names: Sequence[str] | None = None) -> tuple[Benchmark, ...]:
    """Return all tasks of a suite, or the named ones, in the suite's order."""
    check_choice("the suite", suite, list(SUITES))
    known = [benchmark.name for benchmark in SUITES[suite]]
    for name in names or ():
        check_choice(f"a task of the suite {suite!r}", name, known)
    return tuple(item for item in SUITES[suite] if not names or item.name in names)


@dataclass(frozen=True)
class SuiteOptions:
    """Settings of a suite."""

    suite: str = "seed"
    data: Path | None = None  # copies of the hub's datasets, ORG/NAME; None for the hub
    limit: int | None = None  # questions per task, drawn by ``seed``; None for all
    seed: int = 0  # of drawn questions and examples
    shots: int = 0  # examples before each question

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return asdict(self) | {"data": "hub" if self.data is None else str(self.data.resolve())}


@quiet()
def load_tasks(
    benchmark: Benchmark, options: SuiteOptions, dataset: Dataset | None = None
) -> list[Any]:
    """Return lm-eval's tasks of a benchmark: one, or for MMLU one for each subject.

    ``dataset`` returns settings of lm-eval that replace the dataset of a subject.
    """
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.tasks.__file__).parent / benchmark.folder
    manager = TaskManager(include_path=folder, include_defaults=False)
    names, prefix = [benchmark.name], f"{benchmark.name}_"
    if benchmark.name == "mmlu":
        names = [name for name in manager.all_subtasks if name.startswith(prefix)]
    specs = [
        {"task": name, "num_fewshot": options.shots}
        | ({} if dataset is None else dataset(benchmark, name.removeprefix(prefix)))
        | ({} if options.data is None else _copy_of(benchmark, options.data))
        for name in names
    ]
    fetch = fetching(f"the documents of {benchmark.name}", "a directory of copies")
    with nullcontext() if options.data or dataset else fetch:
        # Only members of a group can override the settings of their files.
        tasks = manager.load({"group": f"prismlm_{benchmark.name}", "task": specs})["tasks"]
    for name in names:
        tasks[name].set_fewshot_seed(options.seed)
    return [tasks[name] for name in names]


def _copy_of(benchmark: Benchmark, data: Path) -> dict[str, Any]:
    """Return lm-eval's settings for a copy of the dataset."""
    copy = data / benchmark.hub
    if not copy.is_dir():
        raise InputError(
            f"{copy} is not a directory: expected a copy of the hub's dataset {benchmark.hub}, "
            f"which {benchmark.name} needs (hf download --repo-type dataset --local-dir). Leave "
            "the task out with --tasks, or leave --data out to read from the hub."
        )
    from datasets import config

    # By default another copy of that name would be taken from the cache.
    files = [(str(path), path.stat().st_mtime_ns) for path in sorted(copy.resolve().rglob("*"))]
    cache = Path(config.HF_DATASETS_CACHE) / fingerprints.of_json(files)
    return {"dataset_path": str(copy), "dataset_kwargs": {"cache_dir": str(cache)}}


@contextmanager
def _reading(benchmark: Benchmark, data: Path) -> Iterator[None]:
    """Name the copy in the error where datasets or lm-eval cannot use it."""
    try:
        yield
    except PrismError:
        raise
    except Exception as error:  # their errors have no common base
        raise FormatError(
            f"{data / benchmark.hub} does not hold the questions of {benchmark.name} "
            f"({type(error).__name__}: {first_line(error)}). Expected a whole copy of the hub's "
            f"dataset {benchmark.hub}, with its README.md: download it again (hf download "
            "--repo-type dataset --local-dir)."
        ) from error


class Question(NamedTuple):
    """One document, as lm-eval asks it."""

    number: int  # of the document
    task: Any  # lm-eval's, which scores the answers
    document: dict[str, Any]
    pairs: list[tuple[str, str]]  # (context, continuation) of each answer


# Questions of tasks, and how many a task has.
Selected = dict[Benchmark, tuple[list[Question], int]]


@quiet()
def select_questions(
    benchmark: Benchmark, options: SuiteOptions, dataset: Dataset | None = None
) -> tuple[list[Question], int]:
    """Return the selected questions of a task, and the number of all.

    Questions of MMLU are drawn from all subjects together. ``dataset`` is of :func:`load_tasks`.
    """
    questions: list[Question] = []
    source = (options.data or Path()) / benchmark.hub
    with nullcontext() if options.data is None else _reading(benchmark, options.data):
        tasks = load_tasks(benchmark, options, dataset)
        rows = [(task, row) for task in tasks for row in enumerate(task.task_docs)]
        for number in sample_rows(len(rows), options.limit, options.seed):
            task, (row, document) = rows[number]
            _check_label(task, document, row, source)
            prefix = task.doc_to_prefix(document)
            context = task.fewshot_context(document, options.shots, gen_prefix=prefix)
            name = (task.task_name, number, 1)
            requests = task.construct_requests(doc=document, ctx=context, metadata=name)
            pairs = [request.args for request in requests]
            questions.append(Question(number, task, document, pairs))
    return questions, len(rows)


def _check_label(task: Any, document: dict[str, Any], row: int, source: Path) -> None:
    """Refuse a question without a right answer, which lm-eval would count as answered wrongly."""
    read = task.doc_to_text if task.multiple_input else task.doc_to_target
    label, choices = read(document), len(task.doc_to_choice(document))
    if not isinstance(label, int) or not 0 <= label < choices:
        split = task.config.test_split or task.config.validation_split
        raise FormatError(
            f"row {row} of the {split} set of {task.task_name} in {source} has the label "
            f"{shown(label)}: expected a number from 0 to {choices - 1}. Splits whose answers are "
            "not published have -1: remove such rows, or download the dataset again (hf download "
            "--repo-type dataset --local-dir)."
        )


def ask(
    lm: PredictorLM,
    benchmark: Benchmark,
    selected: tuple[Sequence[Question], int],
    progress: Reporter,
) -> dict[str, Any]:
    """Ask all predictors the selected questions of a task; lm-eval's task scores the answers.

    Of all questions, ``of``, the ``chosen`` ones are asked: ``choices`` is the number of answers,
    and ``correct`` 0 or 1 for each question, by predictor and metric.
    """
    questions, count = selected
    encoded = [lm.encoded(*pair) for question in questions for pair in question.pairs]
    with progress.task(benchmark.title, len(encoded), "answers") as progress_task:
        scores = iter(lm.score(encoded, progress_task.advance))
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
        "choices": [len(question.pairs) for question in questions],
        "correct": correct,
    }


def selected_tasks(names: Sequence[str] | None, options: SuiteOptions) -> Selected:
    """Return the selected questions of the ``names`` of a suite's tasks, or of all."""
    benchmarks = select_benchmarks(options.suite, names)
    return {benchmark: select_questions(benchmark, options) for benchmark in benchmarks}


def ask_ways(
    lm: OpenedModel, ways: Mapping[str, Way], selected: Selected, progress: Reporter = SILENT
) -> list[dict[str, Any]]:
    """Return the accuracy in each task, and the mean: ``plain``, and under ways to suppress.

    Figures are those of :func:`mean_figures`, and ``points``, the change with a 95 % interval.
    """
    asked, rows = WaysLM(lm, ways), list[dict[str, Any]]()
    answers = [ask(asked, *part, progress) for part in selected.items()]
    for group in (*([one] for one in answers), answers):
        row: dict[str, Any] = mean_figures(group)
        for name in ways:
            right = [[one["correct"][arm][HEADLINE] for arm in (name, "plain")] for one in group]
            value, error = _mean([100.0 * np.subtract(*pair) for pair in right])
            half = NORMAL_QUANTILE * error
            row[name]["points"] = Interval(value, value - half, value + half)
        rows.append(row)
    facts = [{"task": one["task"], "questions": len(one["choices"])} for one in answers]
    return [fact | row for fact, row in zip([*facts, {"task": "mean"}], rows, strict=True)]


def task_figures(answers: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one task from the result of :func:`ask`; NaN where undefined.

    ``chance`` is the mean of 1 / choices.
    """
    correct, choices = answers["correct"], np.array(answers["choices"])
    by_metric = {metric: mean_figures([answers], metric) for metric in correct["plain"]}
    return {
        "task": answers["task"],
        "questions": len(choices),
        "of": answers["of"],
        "chance": float(np.mean(1 / choices)),
        "predictors": {
            name: {metric: figures[name] for metric, figures in by_metric.items()}
            for name in correct
        },
    }


def mean_figures(
    answers: Sequence[dict[str, Any]], metric: str = HEADLINE
) -> dict[str, dict[str, Any]]:
    """Return the mean of a metric over tasks, with equal weights, by predictor."""
    figures: dict[str, dict[str, Any]] = {}
    plain = [np.array(one["correct"]["plain"][metric]) for one in answers]
    base = _mean(plain)[0] or np.nan
    for name in answers[0]["correct"]:
        right = [np.array(one["correct"][name][metric]) for one in answers]
        value, error = _mean(right)
        figures[name] = {"value": value, "stderr": error}
        if name != "plain":
            _, error = _mean([a - b for a, b in zip(right, plain, strict=True)])
            figures[name] |= {"change": 100 * (value - base) / base}
            figures[name] |= {"change_stderr": 100 * error / base}
    return figures


def _mean(tasks: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the mean over tasks of the mean over questions, and its standard error."""
    errors = [np.std(x, ddof=1) / len(x) ** 0.5 if len(x) > 1 else np.nan for x in tasks]
    return float(np.mean([x.mean() for x in tasks])), float(np.linalg.norm(errors) / len(tasks))


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

    def answers(benchmark: Benchmark) -> dict[str, Any]:
        return ask(lm, benchmark, select_questions(benchmark, options), progress)

    def result() -> dict[str, Any]:
        files = {item.title: out / TASKS / f"{item.name}.json" for item in SUITES[options.suite]}
        parts = {title: read_json(path) for title, path in files.items() if path.is_file()}
        value = {"model": name, **options.as_json(), "predictors": list(lm.predictors)}
        value["metric"] = HEADLINE
        value["tasks"] = [{"title": title} | task_figures(part) for title, part in parts.items()]
        value["mean"] = mean_figures([*parts.values()])
        return finite(value | {"versions": versions("lm_eval", "torch", "transformers")})

    benchmarks = select_benchmarks(options.suite, tasks)
    parts = {benchmark.name: partial(answers, benchmark) for benchmark in benchmarks}
    return run_study(out / RESULT_FILE, TASKS, note | options.as_json(), parts, result)
