"""A suite of benchmarks asked of one model, task by task; a run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

from prismlm import fingerprints
from prismlm.errors import FormatError, check_whole
from prismlm.eval.accuracy import BAND, HEADLINE, Answers, mean_figures, task_figures
from prismlm.eval.benchmarks import Benchmark, benchmarks_of, drawn, load_tasks
from prismlm.eval.predictors import PredictorLM
from prismlm.eval.runs import make_parts
from prismlm.files import keep_json, read_json
from prismlm.models.checkpoint import load_checkpoint, read_checkpoint
from prismlm.models.seam import LogitMap, verify_logit_map
from prismlm.models.sidecar import has_sidecar
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

FORMAT_VERSION = 1
RESULT_FILE, TASKS = "eval.json", "tasks"
PACKAGES = ("prismlm", "lm_eval", "torch", "transformers", "tokenizers", "datasets")


@dataclass(frozen=True)
class SuiteOptions:
    """What is asked.

    Attributes:
        suite: its name.
        data: a directory of Parquet files; None for the hub.
        limit: questions of a task, drawn by ``seed``; None for all.
        seed: of what is drawn, questions and examples.
        shots: examples before each question.
    """

    suite: str = "seed"
    data: Path | None = None
    limit: int | None = None
    seed: int = 0
    shots: int = 0

    def __post_init__(self) -> None:
        check_whole("shots", self.shots)
        check_whole("the seed", self.seed)
        if self.limit is not None:
            check_whole("limit", self.limit, 1)
        benchmarks_of(self.suite)

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        data = "hub" if self.data is None else str(self.data.resolve())
        return asdict(self) | {"data": data}


class Question(NamedTuple):
    """One document, as lm-eval asks it.

    Attributes:
        number: which of the benchmark's documents it is.
        task: lm-eval's task, which judges the answers.
        document: as that task reads it.
        pairs: (context, continuation) of each answer.
        gold: the right answer's number.
    """

    number: int
    task: Any
    document: dict[str, Any]
    pairs: list[tuple[str, str]]
    gold: int


def open_predictors(path: Path | str, *, device: str = "cpu", batch_size: int = 8) -> PredictorLM:
    """Open a model directory, with a head or without, as the predictors it has."""
    check_whole("the batch size", batch_size, 1)
    if has_sidecar(path):
        model, tokenizer, sidecar = load_checkpoint(path, device=device)
        return PredictorLM(model, tokenizer, sidecar.logit_map, sidecar.head, batch_size=batch_size)
    model, tokenizer = read_checkpoint(path, device=device)
    logit_map = LogitMap.of(model)
    verify_logit_map(model, logit_map)
    return PredictorLM(model, tokenizer, logit_map, batch_size=batch_size)


def questions_of(benchmark: Benchmark, options: SuiteOptions) -> tuple[list[Question], int]:
    """Return the questions of a task that are asked, and how many it has.

    Those of a task with subjects are drawn from all of its subjects together.
    """
    tasks = load_tasks(benchmark, options.data, shots=options.shots, seed=options.seed)
    places = [(task, row) for task in tasks for row in range(len(task.task_docs))]
    chosen = drawn(len(places), options.limit, options.seed)
    return [_question(number, *places[number], options.shots) for number in chosen], len(places)


def _question(number: int, task: Any, row: int, shots: int) -> Question:
    document = task.task_docs[row]
    choices = task.doc_to_choice(document)
    # Where answers stand in the context, as in WinoGrande, lm-eval has the two the other way round.
    try:
        gold = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
        gold = choices.index(gold) if isinstance(gold, str) else gold
    except (ValueError, LookupError):
        gold = -1
    if not 0 <= gold < len(choices):
        raise FormatError(
            f"question {row} of {task.task_name} has {len(choices)} answers, and its label is "
            "none of them: expected the right one. Take the task's own documents."
        )
    context = task.fewshot_context(document, shots, gen_prefix=task.doc_to_prefix(document))
    requests = task.construct_requests(doc=document, ctx=context, metadata=(task.task_name, row, 1))
    return Question(number, task, document, [request.args for request in requests], gold)


def ask(
    lm: PredictorLM, benchmark: Benchmark, options: SuiteOptions, progress: Reporter
) -> Answers:
    """Ask all predictors the questions of a task, and have lm-eval's task judge each."""
    questions, of = questions_of(benchmark, options)
    encoded = [lm.encoded(*pair) for question in questions for pair in question.pairs]
    with progress.task(benchmark.title, len(encoded), "answers") as shown:
        scores = lm.score(encoded, shown.advance)
    correct: dict[str, dict[str, list[int]]] = {name: {} for name in lm.predictors}
    first = truncated = 0
    for question in questions:
        last = first + len(question.pairs)
        truncated += any(lm.truncated(*pair) for pair in encoded[first:last])
        for predictor in lm.predictors:
            answers = [tuple(score[predictor]) for score in scores[first:last]]
            judged = question.task.process_results(question.document, answers)
            for metric, value in judged.items():
                correct[predictor].setdefault(metric, []).append(int(value))
        first = last
    return {
        "task": benchmark.name,
        "of": of,
        "chosen": [question.number for question in questions],
        "gold": [question.gold for question in questions],
        "choices": [len(question.pairs) for question in questions],
        "truncated": truncated,
        "correct": correct,
    }


def run_suite(
    lm: PredictorLM,
    name: str,
    out: Path,
    options: SuiteOptions,
    tasks: Sequence[str] | None = None,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Ask the tasks that ``out`` has no answers of yet, and return the figures of all it has.

    ``out`` then holds ``run.json``, the answers of each task below ``tasks``, and ``eval.json``,
    which is what this returns.

    Args:
        lm: of :func:`open_predictors`.
        name: the model's, for the reader.
        out: a directory; it is made if it is not there.
        options: what is asked. They and the model must be those that ``out`` was begun with.
        tasks: those to ask now; None for the whole suite.
        progress: shows the tasks.
    """
    head = None if lm.head is None else fingerprints.of_model(lm.head)
    identity = fingerprints.of_json([fingerprints.of_model(cast("Any", lm.model)), head])
    note = {"format_version": FORMAT_VERSION, "lm_eval": version("lm_eval"), "model": identity}

    def asking(benchmark: Benchmark) -> Callable[[], Answers]:
        return lambda: ask(lm, benchmark, options, progress)

    parts = {one.name: asking(one) for one in benchmarks_of(options.suite, tasks)}
    with writing(out / RESULT_FILE):
        make_parts(out, TASKS, note | options.as_json(), parts)
        figures = _figures(out, options)
        result = {
            "model": name,
            **options.as_json(),
            "predictors": list(lm.predictors),
            "metric": HEADLINE,
            "band_percent": BAND,
            "tasks": figures,
            "mean": mean_figures(figures),
            "versions": {package: version(package) for package in PACKAGES},
        }
        keep_json(out / RESULT_FILE, result)
    return result


def _figures(out: Path, options: SuiteOptions) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for benchmark in benchmarks_of(options.suite):
        path = out / TASKS / f"{benchmark.name}.json"
        if path.is_file():
            try:
                found = task_figures(cast("Answers", read_json(path)))
            except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
                raise FormatError(
                    f"{path} is not what a run writes ({error!r}). Remove it, and the same command "
                    "asks that task again."
                ) from error
            figures.append({"title": benchmark.title} | found)
    return figures
