"""A suite of benchmarks asked of one model, task by task; a run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

from prismlm import fingerprints
from prismlm.errors import FormatError, check_whole
from prismlm.eval.accuracy import BAND, HEADLINE, Answers, mean_figures, task_figures
from prismlm.eval.benchmarks import Benchmark, benchmarks_of, drawn, load_tasks
from prismlm.eval.predictors import PredictorLM
from prismlm.files import keep_json, read_json
from prismlm.models.checkpoint import load_checkpoint, read_checkpoint
from prismlm.models.seam import LogitMap, verify_logit_map
from prismlm.models.sidecar import has_sidecar
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import begin, keeping, writing

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
        if self.limit is not None:
            check_whole("limit", self.limit, 1)
        benchmarks_of(self.suite)


class Question(NamedTuple):
    """One document, as lm-eval asks it.

    Attributes:
        number: which of the task's documents it is.
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
    """Open a model directory, with a head or without, as the predictors it has.

    Raises:
        InputError: no such directory or device, a model that predicts no tokens, or a batch size
            below 1.
        FormatError: what is in it is no checkpoint, or damaged.
    """
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
    context = task.fewshot_context(document, shots, gen_prefix=task.doc_to_prefix(document))
    requests = task.construct_requests(doc=document, ctx=context, metadata=(task.task_name, row, 1))
    # Where answers stand in the context, as in WinoGrande, lm-eval has the two the other way round.
    gold = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
    if isinstance(gold, str):
        choices = task.doc_to_choice(document)
        gold = choices.index(gold) if gold in choices else -1
    if not 0 <= gold < len(requests):
        raise FormatError(
            f"question {row} of {task.task_name} has {len(requests)} answers, and the right one is "
            f"said to be number {gold}: expected one of them."
        )
    return Question(number, task, document, [request.args for request in requests], gold)


def ask(lm: PredictorLM, task: str, questions: list[Question], of: int, advance: Any) -> Answers:
    """Ask all predictors all questions, and have lm-eval's task judge each."""
    encoded = [lm.encoded(*pair) for question in questions for pair in question.pairs]
    scores = lm.score(encoded, advance)
    correct: dict[str, dict[str, list[int]]] = {name: {} for name in lm.predictors}
    first = truncated = 0
    for question in questions:
        last = first + len(question.pairs)
        truncated += any(lm.truncated(*pair) for pair in encoded[first:last])
        for predictor in lm.predictors:
            said = [tuple(score[predictor]) for score in scores[first:last]]
            judged = question.task.process_results(question.document, said)
            for metric, value in judged.items():
                correct[predictor].setdefault(metric, []).append(int(value))
        first = last
    return {
        "task": task,
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

    Raises:
        InputError: a task that does not exist, other options or another model than ``out`` has,
            documents that cannot be had, or another process that writes there.
        FormatError: a file in ``out`` is damaged, or a document is not what its task needs.
        Interrupted: Ctrl-C; finished tasks are kept.
    """
    kept = out / TASKS
    left = [
        benchmark
        for benchmark in benchmarks_of(options.suite, tasks)
        if not (kept / f"{benchmark.name}.json").is_file()
    ]
    # What cannot be asked at all leaves nothing behind.
    ready = [questions_of(benchmark, options) for benchmark in left[:1]]
    kept.mkdir(parents=True, exist_ok=True)
    with writing(out / RESULT_FILE):
        run = {"format_version": FORMAT_VERSION, "lm_eval": version("lm_eval")}
        run |= {"model": _identity(lm), **_plain(options)}
        begin(out, run, made=any(kept.glob("*.json")))
        with keeping(lambda: f"{len([*kept.glob('*.json')])} finished tasks are kept in {out}."):
            for benchmark in left:
                path = kept / f"{benchmark.name}.json"
                questions, of = ready.pop() if ready else questions_of(benchmark, options)
                total = sum(len(question.pairs) for question in questions)
                with progress.task(benchmark.title, total, "answers") as task:
                    keep_json(path, ask(lm, benchmark.name, questions, of, task.advance))
        result = _result(name, out, options, lm)
        keep_json(out / RESULT_FILE, result)
    return result


def _result(name: str, out: Path, options: SuiteOptions, lm: PredictorLM) -> dict[str, Any]:
    figures: list[dict[str, Any]] = []
    for benchmark in benchmarks_of(options.suite):
        path = out / TASKS / f"{benchmark.name}.json"
        if path.is_file():
            try:
                found = task_figures(cast("Answers", read_json(path)))
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise FormatError(
                    f"{path} is not what a run writes ({error!r}). Remove it, and the same command "
                    "asks that task again."
                ) from error
            figures.append({"title": benchmark.title} | found)
    return {
        "model": name,
        **_plain(options),
        "predictors": list(lm.predictors),
        "metric": HEADLINE,
        "band_percent": BAND,
        "tasks": figures,
        "mean": mean_figures(figures),
        "versions": {package: version(package) for package in PACKAGES},
    }


def _plain(options: SuiteOptions) -> dict[str, Any]:
    data = "hub" if options.data is None else str(options.data.resolve())
    return asdict(options) | {"data": data}


def _identity(lm: PredictorLM) -> str:
    head = None if lm.head is None else fingerprints.of_model(lm.head)
    return fingerprints.of_json([fingerprints.of_model(cast("Any", lm.model)), head])
