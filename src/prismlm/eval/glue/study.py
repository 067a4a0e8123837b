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
from typing import Any, NamedTuple

import numpy as np

from prismlm.errors import DivergenceError
from prismlm.eval.benchmarks import drawn
from prismlm.eval.glue.data import MAX_SCORE, MIN_SCORE, Task, read_split, tasks_of
from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions, encode, fine_tune
from prismlm.eval.runs import make_parts, read_part
from prismlm.files import check_json, keep_json
from prismlm.outputs import write_text
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import read_note, writing
from prismlm.statistics import Interval, interval_of, spearman

RUNS, RESULT_FILE, SEARCH, SEARCH_FILE = "runs", "glue.json", "search", "search.json"
RATES = (2.5e-5, 3.5e-5, 5.5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 7e-4, 8.5e-4, 1e-3)
WARMUPS = (0.06, 0.1)
SEARCH_TASKS = ("sst2", "mnli")
# Rate and warm-up that the source chose for its own models, by model_type; llama's for all others.
SOURCE_SETTINGS = {
    "prismlm_protot": (3.5e-5, 0.06),
    "mamba": (1e-4, 0.1),
    "mamba2": (1e-4, 0.1),
    "prismlm_deltanet": (7e-4, 0.1),
    "llama": (5.5e-5, 0.1),
}


class Encoded(NamedTuple):
    """Rows of a split as tokens, with class numbers or scores unless these are hidden."""

    tokens: list[list[int]]
    labels: np.ndarray | None
    where: str


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

    Args:
        lm: the model.
        out: a directory, created if necessary.
        options: of every run; with the model, the same as those that ``out`` was started with.
        tasks: None for all nine.
        seeds: of new layers, drawn rows, their order and dropout; one run for each.
        from_scratch: also fine-tune a freshly initialised model of the same configuration.
        progress: shows the runs.
    """
    options, rate_from = with_rate(lm, out, options)
    data = _reader(lm, options)
    parts = {
        f"{task.name}-{seed}{'-from-scratch' if fresh else ''}": partial(
            _run, lm, out, task, data, options, seed, progress, from_scratch=fresh
        )
        for task, fresh, seed in product(tasks_of(tasks), (False, True)[: 1 + from_scratch], seeds)
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
    data = _reader(lm, options)
    settings = list(product(rates, WARMUPS))

    def trial(task: Task, rate: float, warmup: float) -> dict[str, Any]:
        trial_options = replace(options, learning_rate=rate, warmup=warmup)
        try:
            return _run(lm, directory, task, data, trial_options, seed, progress)
        except DivergenceError as error:
            return {"dev_history": [], "diverged": str(error)}

    parts = {
        f"{task.name}-{seed}-{rate:g}-{warmup:g}": partial(trial, task, rate, warmup)
        for task in tasks_of(SEARCH_TASKS)
        for rate, warmup in settings
    }
    with writing(directory / SEARCH_FILE):
        _check_data(directory, options, parts)
        make_parts(directory, RUNS, options.note(lm), parts)
        tried = [{"learning_rate": rate, "warmup": warmup} for rate, warmup in settings]
        for row, task in product(tried, SEARCH_TASKS):
            name = f"{task}-{seed}-{row['learning_rate']:g}-{row['warmup']:g}.json"
            row[task] = read_part(directory / RUNS / name, _best_on_dev)
        best = max(tried, key=lambda row: sum(row[task] for task in SEARCH_TASKS))
        result = options.note(lm) | {"seed": seed} | best | {"tried": tried}
        keep_json(directory / SEARCH_FILE, result)
    return result


def _best_on_dev(run: dict[str, Any]) -> float:
    return max([0.0, *run["dev_history"]])


def _check_data(out: Path, options: GlueOptions, parts: Iterable[str]) -> None:
    """Check before the first run that the data of all runs are there."""
    left = {name.split("-")[0] for name in parts if not (out / RUNS / f"{name}.json").is_file()}
    for task in tasks_of(sorted(left)) if left else ():
        for split in ("train", "dev"):
            read_split(task, split, options.data)


def _reader(lm: GlueModel, options: GlueOptions) -> Callable[[Task], dict[str, Encoded]]:
    """Return a function that reads the available splits of a task; it caches the last task's."""

    @lru_cache(maxsize=1)
    def read(name: str) -> dict[str, Encoded]:
        (task,) = tasks_of([name])
        encoded: dict[str, Encoded] = {}
        for split in task.splits:
            skip = split.startswith("test") and not options.test
            rows = None if skip else read_split(task, split, options.data)
            if rows is not None:
                limit = options.dev_limit if split.startswith("dev") else None
                chosen = drawn(len(rows.texts), limit, 0)
                tokens = encode(lm.tokenizer, [rows.texts[row] for row in chosen], lm.length)
                labels = None if rows.labels is None else np.array(rows.labels)[chosen]
                encoded[split] = Encoded(tokens, labels, rows.where)
        return encoded

    return lambda task: read(task.name)


def _run(
    lm: GlueModel,
    out: Path,
    task: Task,
    data: Callable[[Task], dict[str, Encoded]],
    options: GlueOptions,
    seed: int,
    progress: Reporter,
    *,
    from_scratch: bool = False,
) -> dict[str, Any]:
    """Return the record of a run, after writing the files for the server."""
    splits: dict[str, Any] = dict(data(task))
    train, dev = splits.pop("train"), splits["dev"]
    chosen = drawn(len(train.tokens), options.limit, seed)
    rows, labels = [train.tokens[row] for row in chosen], train.labels[chosen].tolist()
    classifier = lm.classifier(task, seed, from_scratch=from_scratch)

    def predict(split: Encoded) -> np.ndarray:
        return answers(task, classifier.predict(split.tokens))

    def judge() -> float:
        return measure(task, dev.labels, predict(dev))[task.metrics[0]]

    title = f"{task.title}, seed {seed}{', from scratch' if from_scratch else ''}"
    with progress.task(title, options.steps(len(rows)), "steps") as progress_task:
        history = fine_tune(classifier, rows, labels, judge, options, seed, progress_task)
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
            measured[name] = {"rows": len(predictions), "where": split.where} | both
    settings = ("learning_rate", "warmup", "epochs", "batch_size")
    return {name: getattr(options, name) for name in settings} | {
        "task": task.name,
        "seed": seed,
        "from_scratch": from_scratch,
        "dev_history": history,
        "train": {"rows": len(rows), "where": train.where},
        "measured": measured,
    }


def server_file(task: Task, predictions: Sequence[Any] | np.ndarray) -> str:
    """Return the predictions of a test set in the format of GLUE's server."""
    names = [task.labels[answer] if task.labels else f"{answer:.3f}" for answer in predictions]
    rows = [f"{row}\t{name}\n" for row, name in enumerate(names)]
    return "".join(["index\tprediction\n", *rows])


def figures(out: Path) -> list[dict[str, Any]]:
    """Return the figures of all runs of a directory, by task and measured split."""
    runs = [read_part(path, _parse_run) for path in sorted((out / RUNS).glob("*.json"))]
    runs.sort(key=lambda run: run["seed"])
    rows: list[dict[str, Any]] = []
    for task in tasks_of():
        task_runs = [run for run in runs if run["task"] == task.name]
        for split, description in task.splits.items():
            measured = [
                run | run["measured"][split] for run in task_runs if split in run["measured"]
            ]
            if measured:
                row = {"task": task.name, "title": description.title, "split": split}
                rows.append(row | _figure(task, measured))
    return rows


def _parse_run(run: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run with its answers as arrays."""
    measured = {
        split: {"rows": part["rows"], "where": part["where"]}
        | {key: np.array(part[key], float) for key in ("gold", "given")}
        for split, part in run["measured"].items()
    }
    fields = {key: run[key] for key in ("task", "seed", "from_scratch", "train")}
    return fields | {"measured": measured}


def _figure(task: Task, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one split, from runs of both arms."""
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


def _pearson(gold: np.ndarray, given: np.ndarray) -> np.ndarray:
    g, p = (values - values.mean(-1, keepdims=True) for values in (gold, given))
    return _ratio((g * p).sum(-1), np.sqrt((g * g).sum(-1) * (p * p).sum(-1)))


# Official metrics of resamples [..., N], 0 where they are undefined.
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "accuracy": lambda gold, given: (gold == given).mean(-1),
    "f1": lambda gold, given: _ratio(2 * (gold * given).sum(-1), (gold + given).sum(-1)),
    # Of two classes, 0 and 1, Matthews' is Pearson's correlation.
    "matthews": _pearson,
    "pearson": _pearson,
    "spearman": lambda gold, given: spearman(gold, given).rho,
}


def measure(task: Task, gold: np.ndarray, given: np.ndarray) -> dict[str, float]:
    """Return the official metrics of a task's answers."""
    both = gold.astype(float), given.astype(float)
    return {name: float(METRICS[name](*both)) for name in task.metrics}


def constant(metric: str, gold: np.ndarray) -> float:
    """Return the best metric of a constant answer: for accuracy the majority's share.

    F1 is best for the constant answer 1; correlations are 0.
    """
    if metric not in ("accuracy", "f1"):
        return 0.0
    return max(float(METRICS[metric](gold, np.full_like(gold, c))) for c in np.unique(gold))


def interval(metric: str, gold: np.ndarray, given: Sequence[np.ndarray]) -> Interval:
    """Return the mean of a metric over seeds with its 95 % interval over resampled dev rows.

    All seeds answer the same rows [N], which are resampled together.
    """
    metric_of, truth = METRICS[metric], gold.astype(float)
    seeds = [predictions.astype(float) for predictions in given]
    return interval_of(
        lambda rows: np.mean([metric_of(truth[rows], s[rows]) for s in seeds], axis=0), len(gold)
    )
