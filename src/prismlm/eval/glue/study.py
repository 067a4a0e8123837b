"""A model on GLUE: every task and seed fine-tuned from the same weights, and the search before.

A directory holds ``run.json`` (the settings), ``runs/TASK-SEED.json`` of each finished run,
``predictions/SEED/*.tsv`` for GLUE's server, and ``glue.json``, the figures; its ``search`` holds
the runs that chose rate and warm-up, and ``search/search.json`` the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from prismlm.errors import DivergenceError
from prismlm.eval.glue.data import MAX_SCORE, MIN_SCORE, Rows, Task, read_split, select_tasks
from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions, encode, fine_tune
from prismlm.eval.runs import make_parts, read_part, sample_rows
from prismlm.files import check_json, keep_json
from prismlm.outputs import write_text
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import read_note, writing
from prismlm.statistics import Interval, interval_of, spearman

RUNS, RESULT_FILE, SEARCH, SEARCH_FILE = "runs", "glue.json", "search", "search.json"
RATES = (2.5e-5, 3.5e-5, 5.5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 7e-4, 8.5e-4, 1e-3)
WARMUPS = (0.06, 0.1)
SEARCH_TASKS = ("sst2", "mnli")
# Rate and warm-up of ProtoT's authors by model_type; llama's for all others.
SOURCE_SETTINGS = {
    "prismlm_protot": (3.5e-5, 0.06),
    "mamba": (1e-4, 0.1),
    "mamba2": (1e-4, 0.1),
    "prismlm_deltanet": (7e-4, 0.1),
    "llama": (5.5e-5, 0.1),
}


def run_glue(
    lm: GlueModel,
    out: Path,
    options: GlueOptions,
    tasks: Sequence[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    from_scratch: bool = False,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Make the runs that ``out`` lacks, and return the figures of all its runs.

    A seed determines the new layer, the training rows, their order and dropout. With
    ``from_scratch``, a freshly initialised model of the same configuration is trained as well.
    Model and options must be those that ``out`` was started with.
    """
    options, rate_from = with_rate(lm, out, options)
    data = lru_cache(maxsize=1)(partial(_read_task, lm, options))
    parts = {
        f"{task.name}-{seed}{'-from-scratch' if fresh else ''}": partial(
            _run, lm, out, task, data, options, seed, progress, from_scratch=fresh
        )
        for task, fresh, seed in product(
            select_tasks(tasks), (False, True)[: 1 + from_scratch], seeds
        )
    }
    with writing(out / RESULT_FILE):
        _check_data(out, options, parts)
        make_parts(out, RUNS, options.note(lm), parts)
        result = {"name": lm.name, **options.note(lm), "rate_from": rate_from}
        result["tasks"] = figures(out)
        keep_json(out / RESULT_FILE, result)
    return result


def with_rate(lm: GlueModel, out: Path, options: GlueOptions) -> tuple[GlueOptions, str]:
    """Return options with rate and warm-up, and the origin of these."""
    path = out / SEARCH / SEARCH_FILE
    rate, warmup = SOURCE_SETTINGS.get(lm.model.config.model_type, SOURCE_SETTINGS["llama"])
    rate_from = "the source's"
    if path.is_file():
        choice = read_note(path, path.parent, model=lm.identity)
        check_json(choice, {"learning_rate": float, "warmup": float}, str(path))
        rate, warmup, rate_from = choice["learning_rate"], choice["warmup"], "searched"
    if options.learning_rate is not None or options.warmup is not None:
        rate_from = "given"
    rate = rate if options.learning_rate is None else options.learning_rate
    warmup = warmup if options.warmup is None else options.warmup
    return replace(options, learning_rate=rate, warmup=warmup), rate_from


def search(
    lm: GlueModel,
    out: Path,
    options: GlueOptions,
    seed: int = 0,
    progress: Reporter = SILENT,
    rates: Sequence[float] = RATES,
) -> dict[str, Any]:
    """Choose rate and warm-up by the mean dev accuracy on SST-2 and MNLI, and store the choice.

    A run that diverges counts as 0.
    """
    directory = out / SEARCH
    options = replace(options, learning_rate=None, warmup=None, test=False)
    data = lru_cache(maxsize=1)(partial(_read_task, lm, options))

    def trial(task: Task, rate: float, warmup: float) -> dict[str, Any]:
        trial_options = replace(options, learning_rate=rate, warmup=warmup)
        try:
            return _run(lm, directory, task, data, trial_options, seed, progress)
        except DivergenceError as error:
            return {"dev_history": [], "diverged": str(error)}

    def accuracy(task: str, rate: float, warmup: float) -> float:
        path = directory / RUNS / f"{task}-{seed}-{rate:g}-{warmup:g}.json"
        return read_part(path, lambda run: max([0.0, *run["dev_history"]]))

    parts = {
        f"{task.name}-{seed}-{rate:g}-{warmup:g}": partial(trial, task, rate, warmup)
        for task, rate, warmup in product(select_tasks(SEARCH_TASKS), rates, WARMUPS)
    }
    with writing(directory / SEARCH_FILE):
        _check_data(directory, options, parts)
        make_parts(directory, RUNS, options.note(lm), parts)
        tried = [
            {"learning_rate": rate, "warmup": warmup}
            | {task: accuracy(task, rate, warmup) for task in SEARCH_TASKS}
            for rate, warmup in product(rates, WARMUPS)
        ]
        best = max(tried, key=lambda row: sum(row[task] for task in SEARCH_TASKS))
        result = options.note(lm) | {"seed": seed} | best | {"tried": tried}
        keep_json(directory / SEARCH_FILE, result)
    return result


def _check_data(out: Path, options: GlueOptions, parts: Iterable[str]) -> None:
    """Check before the first run that the data of all runs are available."""
    missing = {name.split("-")[0] for name in parts if not (out / RUNS / f"{name}.json").is_file()}
    for task in select_tasks(sorted(missing)) if missing else ():
        for split in ("train", "dev"):
            read_split(task, split, options.data)


def _read_task(lm: GlueModel, options: GlueOptions, task: Task) -> dict[str, Rows]:
    """Return the tokens and labels of the available splits of a task."""
    splits: dict[str, Rows] = {}
    for split in task.splits:
        skip = split.startswith("test") and not options.test
        rows = None if skip else read_split(task, split, options.data)
        if rows is not None:
            limit = options.dev_limit if split.startswith("dev") else None
            chosen = sample_rows(len(rows.inputs), limit, 0)
            tokens = encode(lm.tokenizer, [rows.inputs[row] for row in chosen], lm.length)
            labels = None if rows.labels is None else rows.labels[chosen]
            splits[split] = Rows(tokens, labels, rows.source)
    return splits


def _run(
    lm: GlueModel,
    out: Path,
    task: Task,
    data: Callable[[Task], dict[str, Rows]],
    options: GlueOptions,
    seed: int,
    progress: Reporter,
    *,
    from_scratch: bool = False,
) -> dict[str, Any]:
    """Return the record of a run, after writing the files for GLUE's server."""
    splits: dict[str, Any] = dict(data(task))
    train, dev = splits.pop("train"), splits["dev"]
    chosen = sample_rows(len(train.inputs), options.limit, seed)
    rows, labels = [train.inputs[row] for row in chosen], train.labels[chosen].tolist()
    classifier = lm.classifier(task, seed, from_scratch=from_scratch)

    def predict(split: Rows) -> np.ndarray:
        return answers(task, classifier.predict(split.inputs))

    def evaluate() -> float:
        return measure(task, dev.labels, predict(dev))[task.metrics[0]]

    title = f"{task.title}, seed {seed}{', from scratch' if from_scratch else ''}"
    steps = options.epochs * -(-len(rows) // options.batch_size)
    with progress.task(title, steps, "steps") as progress_task:
        history = fine_tune(classifier, rows, labels, evaluate, options, seed, progress_task)
    measured: dict[str, Any] = {}
    for name, split in splits.items():
        submitted = name.startswith("test") and not from_scratch
        if not submitted and split.labels is None:
            continue
        predictions = predict(split)
        if submitted:
            file = out / "predictions" / str(seed) / f"{task.splits[name].title}.tsv"
            write_text(file, server_file(task, predictions))
        if split.labels is not None:
            both = {"gold": split.labels.tolist(), "given": predictions.tolist()}
            measured[name] = {"rows": len(predictions), "where": split.source} | both
    settings = ("learning_rate", "warmup", "epochs", "batch_size")
    return {name: getattr(options, name) for name in settings} | {
        "task": task.name,
        "seed": seed,
        "from_scratch": from_scratch,
        "dev_history": history,
        "train": {"rows": len(rows), "where": train.source},
        "measured": measured,
    }


def server_file(task: Task, predictions: Sequence[Any] | np.ndarray) -> str:
    """Return the predictions of a test set in the format of GLUE's server."""
    names = [task.labels[answer] if task.labels else f"{answer:.3f}" for answer in predictions]
    rows = [f"{row}\t{name}\n" for row, name in enumerate(names)]
    return "".join(["index\tprediction\n", *rows])


def figures(out: Path) -> list[dict[str, Any]]:
    """Return the figures of all runs of a directory, by task and measured split."""
    paths = sorted((out / RUNS).glob("*.json"))
    runs = [run for path in paths for run in read_part(path, _measured_splits)]
    runs.sort(key=lambda run: run["seed"])
    rows: list[dict[str, Any]] = []
    for task in select_tasks():
        for split, description in task.splits.items():
            of_split = [run for run in runs if (run["task"], run["split"]) == (task.name, split)]
            if of_split:
                row = {"task": task.name, "title": description.title, "split": split}
                rows.append(row | _figure(task, of_split))
    return rows


def _measured_splits(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each measured split of a run its record, with answers as arrays."""
    shared = {key: run[key] for key in ("task", "seed", "from_scratch", "train")}
    return [
        shared
        | {"split": split, "rows": part["rows"], "where": part["where"]}
        | {key: np.array(part[key], float) for key in ("gold", "given")}
        for split, part in run["measured"].items()
    ]


def _figure(task: Task, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one split, from fine-tuned runs and those from scratch."""
    first = runs[0]
    row: dict[str, Any] = {
        "metrics": list(task.metrics),
        "measured": {key: first[key] for key in ("rows", "where")},
        "train": first["train"],
        "constant": {metric: constant(metric, first["gold"]) for metric in task.metrics},
        "fine_tuned": None,
        "from_scratch": None,
    }
    for arm, from_scratch in (("fine_tuned", False), ("from_scratch", True)):
        arm_runs = [run for run in runs if run["from_scratch"] == from_scratch]
        if arm_runs:
            measured = [measure(task, run["gold"], run["given"]) for run in arm_runs]
            values = {metric: [m[metric] for m in measured] for metric in task.metrics}
            spread = interval(task.metrics[0], first["gold"], [run["given"] for run in arm_runs])
            row[arm] = {
                "seeds": [run["seed"] for run in arm_runs],
                "values": values,
                "mean": {metric: float(np.mean(values[metric])) for metric in task.metrics},
                "low": spread.low,
                "high": spread.high,
            }
    return row


def answers(task: Task, outputs: np.ndarray) -> np.ndarray:
    """Return the answers of a classifier's outputs [N, C]: classes, or scores from 0 to 5."""
    return outputs.argmax(-1) if task.labels else outputs[:, 0].clip(MIN_SCORE, MAX_SCORE)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    zeros = np.zeros(np.shape(denominator))
    return np.divide(numerator, denominator, out=zeros, where=denominator > 0)


def _pearson(gold: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    g, p = (values - values.mean(-1, keepdims=True) for values in (gold, predicted))
    return _ratio((g * p).sum(-1), np.sqrt((g * g).sum(-1) * (p * p).sum(-1)))


# Official metrics of resamples [..., N], 0 where they are undefined; Spearman's of [N] only.
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "accuracy": lambda gold, predicted: (gold == predicted).mean(-1),
    "f1": lambda gold, predicted: _ratio(
        2 * (gold * predicted).sum(-1), (gold + predicted).sum(-1)
    ),
    # Matthews' correlation of the classes 0 and 1 is Pearson's.
    "matthews": _pearson,
    "pearson": _pearson,
    "spearman": lambda gold, predicted: spearman(gold, predicted).rho,
}


def measure(task: Task, gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return the official metrics of a task's answers."""
    return {name: float(METRICS[name](gold, predicted)) for name in task.metrics}


def constant(metric: str, gold: np.ndarray) -> float:
    """Return the best metric of a constant answer: the majority's share for accuracy.

    F1 is best for the constant answer 1; correlations are 0.
    """
    if metric not in ("accuracy", "f1"):
        return 0.0
    return max(float(METRICS[metric](gold, np.full_like(gold, c))) for c in np.unique(gold))


def interval(metric: str, gold: np.ndarray, predicted: Sequence[np.ndarray]) -> Interval:
    """Return the mean of a metric over seeds with its 95 % interval over resampled dev rows.

    All seeds answer the same rows [N], which are resampled together.
    """
    metric_of = METRICS[metric]
    return interval_of(
        lambda rows: np.mean([metric_of(gold[rows], p[rows]) for p in predicted], axis=0), len(gold)
    )
