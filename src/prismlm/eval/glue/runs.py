"""Runs of a study: what is asked of them, one after another, each kept when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prismlm.errors import DivergenceError
from prismlm.eval.benchmarks import drawn
from prismlm.eval.glue.classifier import GlueModel, encode
from prismlm.eval.glue.data import Rows, read_split
from prismlm.eval.glue.fine_tune import Examples, GlueOptions, fine_tune
from prismlm.eval.glue.metrics import RUNS, answers, measure
from prismlm.eval.glue.tasks import Task
from prismlm.files import keep_json, read_json
from prismlm.outputs import write_text
from prismlm.progress import Reporter
from prismlm.run_state import begin, keeping


class Data(NamedTuple):
    """A task's splits that are there, as rows and as tokens, and how many rows were cut."""

    rows: dict[str, Rows]
    tokens: dict[str, list[list[int]]]
    cut: int

    def training(self, limit: int | None, seed: int) -> Examples:
        """Return what a seed trains on."""
        rows, labels = self.tokens["train"], self.rows["train"].labels or []
        chosen = drawn(len(rows), limit, seed)
        return Examples([rows[n] for n in chosen], [labels[n] for n in chosen])

    def gold(self) -> dict[str, np.ndarray]:
        """Return the labels of every set but train that has any."""
        return {
            name: np.array(rows.labels)
            for name, rows in self.rows.items()
            if name != "train" and rows.labels is not None
        }

    def described(self, task: Task, split: str) -> dict[str, Any]:
        """Return how many rows of which file are read, of how many that GLUE has."""
        rows = self.rows[split]
        count = {"rows": len(rows.texts), "there": rows.there, "of": task.splits[split].rows}
        return count | {"where": rows.where}


class Work(NamedTuple):
    """One run: the name of its file, a task, a seed, options, and the weights it begins with."""

    name: str
    task: Task
    seed: int
    options: GlueOptions
    from_scratch: bool = False


def read_task(lm: GlueModel, task: Task, options: GlueOptions) -> Data:
    """Return the splits of a task; all of train, from which each seed draws its own."""
    found = {name: read_split(task, name, options.data) for name in task.splits_of("train")}
    found |= {
        name: rows.some(options.dev_limit, 0)
        for name in task.splits_of("dev")
        if (rows := read_split(task, name, options.data)) is not None
    }
    if options.test:
        found |= {name: read_split(task, name, options.data) for name in task.splits_of("test")}
    rows = {name: split for name, split in found.items() if split is not None}
    encoded = {name: encode(lm.tokenizer, split.texts, lm.length) for name, split in rows.items()}
    tokens = {name: tokens for name, (tokens, _) in encoded.items()}
    return Data(rows, tokens, sum(cut for _, cut in encoded.values()))


def make_runs(
    lm: GlueModel,
    place: Path,
    options: GlueOptions,
    wanted: list[Work],
    progress: Reporter,
    *,
    may_diverge: bool = False,
) -> list[dict[str, Any]]:
    """Return all runs, those made before and those made now."""
    kept = place / RUNS
    left = [work for work in wanted if not (kept / f"{work.name}.json").is_file()]
    for task in {work.task.name: work.task for work in left}.values():
        # What the last task lacks is not to be found out after the runs of all others.
        for split in ("train", "dev"):
            read_split(task, split, options.data)
    kept.mkdir(parents=True, exist_ok=True)
    begin(place, options.note(lm), made=any(kept.glob("*.json")))
    name, data = "", None
    with keeping(lambda: f"{len([*kept.glob('*.json')])} finished runs are kept in {place}."):
        for work in left:
            if data is None or name != work.task.name:
                name, data = work.task.name, read_task(lm, work.task, options)
            try:
                run, predicted = _one_run(lm, work, data, progress)
            except DivergenceError as error:
                if not may_diverge:
                    raise
                run, predicted = {"dev_history": [], "diverged": str(error)}, {}
            for title, text in predicted.items():
                write_text(place / "predictions" / str(work.seed) / f"{title}.tsv", text)
            keep_json(kept / f"{work.name}.json", run)
    return [read_json(kept / f"{work.name}.json") for work in wanted]


def _one_run(
    lm: GlueModel, work: Work, data: Data, progress: Reporter
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what is kept of a run, and the server's files by name."""
    task, options = work.task, work.options
    train, gold = data.training(options.limit, work.seed), data.gold()
    classifier = lm.classifier(task, work.seed, from_scratch=work.from_scratch)

    def given(split: str) -> np.ndarray:
        return answers(task, classifier.predict(data.tokens[split]))

    def judge() -> float:
        return measure(task, gold["dev"], given("dev"))[task.metrics[0]]

    steps = options.steps(len(train.rows))
    title = f"{task.title}, seed {work.seed}{', from scratch' if work.from_scratch else ''}"
    with progress.task(title, steps, "steps") as shown:
        history = fine_tune(classifier, train, judge, options, work.seed, shown)
    measured = {split: given(split) for split in gold}
    settings = ("learning_rate", "warmup", "epochs", "batch_size")
    run = {name: getattr(options, name) for name in settings} | {
        "task": task.name,
        "seed": work.seed,
        "from_scratch": work.from_scratch,
        "dev_history": history,
        "cut": data.cut,
        "train": data.described(task, "train") | {"rows": len(train.rows)},
        "measured": {
            split: data.described(task, split)
            | {"gold": gold[split].tolist(), "given": found.tolist()}
            for split, found in measured.items()
        },
    }
    # The server is for the model; from scratch is its control on dev.
    tests = () if work.from_scratch else task.splits_of("test")
    predicted = {s: measured[s] if s in gold else given(s) for s in tests if s in data.rows}
    return run, {task.splits[s].title: server_file(task, found) for s, found in predicted.items()}


def server_file(task: Task, given: np.ndarray) -> str:
    """Return a test set's answers as GLUE's server reads them."""
    said = [task.labels[one] if task.labels else f"{one:.3f}" for one in given]
    rows = [f"{row}\t{answer}\n" for row, answer in enumerate(said)]
    return "".join(["index\tprediction\n", *rows])
