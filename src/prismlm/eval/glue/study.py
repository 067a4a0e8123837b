"""A model on GLUE: every task and seed fine-tuned from the same weights; and the search before.

A directory holds ``run.json`` (what was asked), ``runs/TASK-SEED.json`` of each that has ended,
``predictions/SEED/*.tsv`` for GLUE's server, and ``glue.json``, the figures; ``search`` within it
holds the runs by which rate and warm-up were chosen, and ``search/search.json`` the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prismlm.errors import DivergenceError
from prismlm.eval.benchmarks import drawn
from prismlm.eval.glue.data import Task, read_split, tasks_of
from prismlm.eval.glue.fine_tune import Examples, GlueModel, GlueOptions, encode, fine_tune
from prismlm.eval.glue.metrics import RUNS, answers, figures, measure
from prismlm.eval.runs import make_parts
from prismlm.files import check_json, keep_json, read_json
from prismlm.outputs import write_text
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import read_note, writing

RESULT_FILE, SEARCH, SEARCH_FILE = "glue.json", "search", "search.json"
RATES = (2.5e-5, 3.5e-5, 5.5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 7e-4, 8.5e-4, 1e-3)
WARMUPS = (0.06, 0.1)
SEARCHED = ("sst2", "mnli")
# What the source chose for its own models, by model_type; the last is for all others.
CHOSEN = {
    "prismlm_protot": (3.5e-5, 0.06),
    "mamba": (1e-4, 0.1),
    "mamba2": (1e-4, 0.1),
    "prismlm_deltanet": (7e-4, 0.1),
    "llama": (5.5e-5, 0.1),
}


class Split(NamedTuple):
    """A part of a task as tokens.

    Attributes:
        tokens: its rows.
        labels: numbers of classes, or scores; None where they are hidden.
        about: rows read, of how many in which file, of how many that GLUE has.
        cut: how many rows were too long.
    """

    tokens: list[list[int]]
    labels: np.ndarray | None
    about: dict[str, Any]
    cut: int


class Work(NamedTuple):
    """One run: a task, a seed, options, and whether it begins with new weights."""

    task: Task
    seed: int
    options: GlueOptions
    from_scratch: bool = False


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
    arms = {"": False, "-from-scratch": True} if from_scratch else {"": False}
    works = {
        f"{task.name}-{seed}{arm}": Work(task, seed, options, arms[arm])
        for task, arm, seed in product(tasks_of(tasks), arms, seeds)
    }
    with writing(out / RESULT_FILE):
        _make_runs(lm, out, options, works, progress)
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
        found = read_note(path, path.parent, model=lm.identity)
        check_json(found, {"learning_rate": float, "warmup": float}, str(path))
        rate, warmup, rate_from = found["learning_rate"], found["warmup"], "searched"
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
    place = out / SEARCH
    options = replace(options, learning_rate=None, warmup=None, test=False)
    works = {
        f"{task.name}-{seed}-{rate:g}-{warmup:g}": Work(
            task, seed, replace(options, learning_rate=rate, warmup=warmup)
        )
        for task, rate, warmup in product(tasks_of(SEARCHED), rates, WARMUPS)
    }
    with writing(place / SEARCH_FILE):
        _make_runs(lm, place, options, works, progress, may_diverge=True)
        tried: dict[GlueOptions, dict[str, Any]] = {}
        for name, work in works.items():
            at = {key: getattr(work.options, key) for key in ("learning_rate", "warmup")}
            path = place / RUNS / f"{name}.json"
            run = read_json(path)
            check_json(run, {"dev_history": list[float]}, str(path))
            highest = max(run["dev_history"], default=0.0)
            tried.setdefault(work.options, at)[work.task.name] = highest
        best = max(tried.values(), key=lambda one: one["sst2"] + one["mnli"])
        result = options.note(lm) | {"seed": seed} | best | {"tried": list(tried.values())}
        keep_json(place / SEARCH_FILE, result)
    return result


def _make_runs(
    lm: GlueModel,
    place: Path,
    options: GlueOptions,
    works: dict[str, Work],
    progress: Reporter,
    *,
    may_diverge: bool = False,
) -> None:
    """Make the runs that a directory lacks; with ``may_diverge`` some may have no history."""
    left = [w for name, w in works.items() if not (place / RUNS / f"{name}.json").is_file()]
    for task in {work.task.name: work.task for work in left}.values():
        # What the last task lacks is not to be found out after the runs of all others.
        for split in ("train", "dev"):
            read_split(task, split, options.data)
    # The rows of one task at a time.
    read: dict[str, dict[str, Split]] = {}

    def make(work: Work) -> dict[str, Any]:
        if work.task.name not in read:
            read.clear()
            read[work.task.name] = _read_task(lm, work.task, options)
        try:
            return _run(lm, place, work, read[work.task.name], progress)
        except DivergenceError as error:
            if not may_diverge:
                raise
            return {"dev_history": [], "diverged": str(error)}

    parts = {name: lambda work=work: make(work) for name, work in works.items()}
    make_parts(place, RUNS, options.note(lm), parts)


def _read_task(lm: GlueModel, task: Task, options: GlueOptions) -> dict[str, Split]:
    """Return the splits of a task that are there; all of train, from which each seed draws."""
    found: dict[str, Split] = {}
    for name, split in task.splits.items():
        if name.startswith("test") and not options.test:
            continue
        rows = read_split(task, name, options.data)
        if rows is None:
            continue
        if name.startswith("dev"):
            rows = rows.some(options.dev_limit, 0)
        tokens, cut = encode(lm.tokenizer, rows.texts, lm.length)
        about = {"rows": len(tokens), "there": rows.there, "of": split.rows, "where": rows.where}
        labels = None if rows.labels is None else np.array(rows.labels)
        found[name] = Split(tokens, labels, about, cut)
    return found


def _run(
    lm: GlueModel, place: Path, work: Work, data: dict[str, Split], progress: Reporter
) -> dict[str, Any]:
    """Return what is kept of a run, and write the files for the server."""
    task, seed, options, from_scratch = work
    whole = data["train"]
    chosen = drawn(len(whole.tokens), options.limit, seed)
    labels = [] if whole.labels is None else whole.labels[chosen].tolist()
    train = Examples([whole.tokens[row] for row in chosen], labels)
    classifier = lm.classifier(task, seed, from_scratch=from_scratch)
    measured = {
        name: (split, split.labels)
        for name, split in data.items()
        if name != "train" and split.labels is not None
    }

    def given(split: Split) -> np.ndarray:
        return answers(task, classifier.predict(split.tokens))

    def judge() -> float:
        dev, gold = measured["dev"]
        return measure(task, gold, given(dev))[task.metrics[0]]

    title = f"{task.title}, seed {seed}{', from scratch' if from_scratch else ''}"
    with progress.task(title, options.steps(len(train.rows)), "steps") as shown:
        history = fine_tune(classifier, train, judge, options, seed, shown)
    for name in () if from_scratch else task.splits_of("test"):
        if name in data:
            file = f"{task.splits[name].title}.tsv"
            text = server_file(task, given(data[name]))
            write_text(place / "predictions" / str(seed) / file, text)
    settings = ("learning_rate", "warmup", "epochs", "batch_size")
    return {name: getattr(options, name) for name in settings} | {
        "task": task.name,
        "seed": seed,
        "from_scratch": from_scratch,
        "dev_history": history,
        "cut": sum(split.cut for split in data.values()),
        "train": whole.about | {"rows": len(train.rows)},
        "measured": {
            name: split.about | {"gold": gold.tolist(), "given": given(split).tolist()}
            for name, (split, gold) in measured.items()
        },
    }


def server_file(task: Task, given: Sequence[Any] | np.ndarray) -> str:
    """Return a test set's answers as GLUE's server reads them."""
    names = [task.labels[one] if task.labels else f"{one:.3f}" for one in given]
    rows = [f"{row}\t{answer}\n" for row, answer in enumerate(names)]
    return "".join(["index\tprediction\n", *rows])
