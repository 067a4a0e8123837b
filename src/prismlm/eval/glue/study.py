"""A model on GLUE: every task and seed fine-tuned from the same weights; and the search before.

A directory holds ``run.json`` (what was asked), ``runs/TASK-SEED.json`` of each that has ended,
``predictions/SEED/*.tsv`` for GLUE's server, and ``glue.json``, the figures; ``search`` within it
holds the runs by which rate and warm-up were chosen, and ``search/search.json`` the choice.
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
from prismlm.eval.glue.data import Task, read_split, tasks_of
from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions, encode, fine_tune
from prismlm.eval.glue.metrics import answers, constant, interval, measure
from prismlm.eval.runs import make_parts, read_part
from prismlm.files import check_json, keep_json
from prismlm.outputs import write_text
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import read_note, writing

RUNS, RESULT_FILE, SEARCH, SEARCH_FILE = "runs", "glue.json", "search", "search.json"
RATES = (2.5e-5, 3.5e-5, 5.5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 7e-4, 8.5e-4, 1e-3)
WARMUPS = (0.06, 0.1)
SEARCHED = ("sst2", "mnli")
# Rate and warm-up that the source chose for its own models, by model_type; llama's for all others.
CHOSEN = {
    "prismlm_protot": (3.5e-5, 0.06),
    "mamba": (1e-4, 0.1),
    "mamba2": (1e-4, 0.1),
    "prismlm_deltanet": (7e-4, 0.1),
    "llama": (5.5e-5, 0.1),
}


class Encoded(NamedTuple):
    """Rows of a split as tokens, with numbers of classes or scores unless these are hidden."""

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
    """Make the runs that ``out`` lacks, and return the figures of all that it has.

    Args:
        lm: the model.
        out: a directory; it is made if it is not there.
        options: what is asked. They and the model must be those that ``out`` was begun with.
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
    """Return options with rate and warm-up, and where these come from."""
    path = out / SEARCH / SEARCH_FILE
    rate, warmup = CHOSEN.get(lm.model.config.model_type, CHOSEN["llama"])
    rate_from = "the source's"
    if path.is_file():
        chosen = read_note(path, path.parent, model=lm.identity)
        check_json(chosen, {"learning_rate": float, "warmup": float}, str(path))
        rate, warmup, rate_from = chosen["learning_rate"], chosen["warmup"], "searched"
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
    """Choose rate and warm-up by the mean dev accuracy on SST-2 and MNLI, and keep the choice.

    Of ``rates`` and both warm-ups of the source. A run that diverges counts as 0.
    """
    directory = out / SEARCH
    options = replace(options, learning_rate=None, warmup=None, test=False)
    data = _reader(lm, options)
    settings = list(product(rates, WARMUPS))

    def history(task: Task, rate: float, warmup: float) -> dict[str, Any]:
        chosen = replace(options, learning_rate=rate, warmup=warmup)
        try:
            return _run(lm, directory, task, data, chosen, seed, progress)
        except DivergenceError as error:
            return {"dev_history": [], "diverged": str(error)}

    parts = {
        f"{task.name}-{seed}-{rate:g}-{warmup:g}": partial(history, task, rate, warmup)
        for task in tasks_of(SEARCHED)
        for rate, warmup in settings
    }
    with writing(directory / SEARCH_FILE):
        _check_data(directory, options, parts)
        make_parts(directory, RUNS, options.note(lm), parts)
        tried = [{"learning_rate": rate, "warmup": warmup} for rate, warmup in settings]
        for row, task in product(tried, SEARCHED):
            name = f"{task}-{seed}-{row['learning_rate']:g}-{row['warmup']:g}.json"
            highest = read_part(
                directory / RUNS / name, lambda run: max([0.0, *run["dev_history"]])
            )
            row[task] = highest
        best = max(tried, key=lambda row: sum(row[task] for task in SEARCHED))
        result = options.note(lm) | {"seed": seed} | best | {"tried": tried}
        keep_json(directory / SEARCH_FILE, result)
    return result


def _check_data(out: Path, options: GlueOptions, parts: Iterable[str]) -> None:
    """Check before the first run that the last one will have its data."""
    left = {name.split("-")[0] for name in parts if not (out / RUNS / f"{name}.json").is_file()}
    for task in tasks_of(sorted(left)) if left else ():
        for split in ("train", "dev"):
            read_split(task, split, options.data)


def _reader(lm: GlueModel, options: GlueOptions) -> Callable[[Task], dict[str, Encoded]]:
    """Return what reads the splits of a task that are there; the last task's are kept."""

    def encoded(task: Task, name: str) -> Encoded | None:
        rows = read_split(task, name, options.data)
        if rows is None:
            return None
        limit = options.dev_limit if name.startswith("dev") else None
        chosen = drawn(len(rows.texts), limit, 0)
        tokens = encode(lm.tokenizer, [rows.texts[row] for row in chosen], lm.length)
        labels = None if rows.labels is None else np.array(rows.labels)[chosen]
        return Encoded(tokens, labels, rows.where)

    @lru_cache(maxsize=1)
    def read(name: str) -> dict[str, Encoded]:
        (task,) = tasks_of([name])
        wanted = [split for split in task.splits if options.test or not split.startswith("test")]
        splits = {split: encoded(task, split) for split in wanted}
        return {split: rows for split, rows in splits.items() if rows is not None}

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
    """Return what is kept of a run, and write the files for the server."""
    splits: dict[str, Any] = dict(data(task))
    train, dev = splits.pop("train"), splits["dev"]
    chosen = drawn(len(train.tokens), options.limit, seed)
    rows, labels = [train.tokens[row] for row in chosen], train.labels[chosen].tolist()
    classifier = lm.classifier(task, seed, from_scratch=from_scratch)

    def given(split: Encoded) -> np.ndarray:
        return answers(task, classifier.predict(split.tokens))

    def judge() -> float:
        return measure(task, dev.labels, given(dev))[task.metrics[0]]

    title = f"{task.title}, seed {seed}{', from scratch' if from_scratch else ''}"
    with progress.task(title, options.steps(len(rows)), "steps") as shown:
        history = fine_tune(classifier, rows, labels, judge, options, seed, shown)
    measured: dict[str, Any] = {}
    for name, split in splits.items():
        predicted = name.startswith("test") and not from_scratch
        if not predicted and split.labels is None:
            continue
        answered = given(split)
        if predicted:
            file = out / "predictions" / str(seed) / f"{task.splits[name].title}.tsv"
            write_text(file, server_file(task, answered))
        if split.labels is not None:
            both = {"gold": split.labels.tolist(), "given": answered.tolist()}
            measured[name] = {"rows": len(answered), "where": split.where} | both
    settings = ("learning_rate", "warmup", "epochs", "batch_size")
    return {name: getattr(options, name) for name in settings} | {
        "task": task.name,
        "seed": seed,
        "from_scratch": from_scratch,
        "dev_history": history,
        "train": {"rows": len(rows), "where": train.where},
        "measured": measured,
    }


def server_file(task: Task, given: Sequence[Any] | np.ndarray) -> str:
    """Return a test set's answers as GLUE's server reads them."""
    names = [task.labels[answer] if task.labels else f"{answer:.3f}" for answer in given]
    rows = [f"{row}\t{name}\n" for row, name in enumerate(names)]
    return "".join(["index\tprediction\n", *rows])


def figures(out: Path) -> list[dict[str, Any]]:
    """Return what the runs of a directory come to, by task and set that was measured."""
    runs = [read_part(path, _kept_run) for path in sorted((out / RUNS).glob("*.json"))]
    runs.sort(key=lambda run: run["seed"])
    rows: list[dict[str, Any]] = []
    for task in tasks_of():
        of_task = [run for run in runs if run["task"] == task.name]
        for split, about in task.splits.items():
            measured = [run | run["measured"][split] for run in of_task if split in run["measured"]]
            if measured:
                row = {"task": task.name, "title": about.title, "split": split}
                rows.append(row | _figure(task, measured))
    return rows


def _kept_run(run: dict[str, Any]) -> dict[str, Any]:
    """Return a kept run with its answers as arrays."""
    kept = {key: run[key] for key in ("task", "seed", "from_scratch", "train")}
    measured = {
        split: {"rows": part["rows"], "where": part["where"]}
        | {key: np.array(part[key], float) for key in ("gold", "given")}
        for split, part in run["measured"].items()
    }
    return kept | {"measured": measured}


def _figure(task: Task, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one set, of the runs of both arms that measured it."""
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
        own = [run for run in runs if run["from_scratch"] == from_scratch]
        if own:
            measured = [measure(task, run["gold"], run["given"]) for run in own]
            values = {metric: [one[metric] for one in measured] for metric in task.metrics}
            spread = interval(task.metrics[0], first["gold"], [run["given"] for run in own])
            row[arm] = {
                "seeds": [run["seed"] for run in own],
                "values": values,
                "mean": {metric: float(np.mean(values[metric])) for metric in task.metrics},
                "low": spread.low,
                "high": spread.high,
            }
    return row
