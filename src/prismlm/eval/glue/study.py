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
from prismlm.eval.glue.data import Rows, Task, read_split, tasks_of
from prismlm.eval.glue.fine_tune import (
    Examples,
    GlueModel,
    GlueOptions,
    encode,
    fine_tune,
)
from prismlm.eval.glue.metrics import RUNS, answers, figures, measure
from prismlm.files import check_json, keep_json, read_json
from prismlm.outputs import write_text
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import begin, keeping, read_note, writing

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

    Raises:
        InputError: a task that does not exist, data that cannot be had, other options or another
            model than ``out`` has, or another process that writes there.
        FormatError: a file is damaged, or data are not a task's.
        DivergenceError: a loss is not finite.
        Interrupted: Ctrl-C; finished runs are kept.
    """
    options, rate_from = with_rate(lm, out, options)
    wanted = runs_wanted(options, tasks, seeds, from_scratch=from_scratch)
    with writing(out / RESULT_FILE):
        _make_runs(lm, out, options, wanted, progress)
        result = {"name": lm.name, **options.note(lm), "rate_from": rate_from}
        result["tasks"] = figures(out)
        keep_json(out / RESULT_FILE, result)
    return result


def runs_wanted(
    options: GlueOptions, tasks: Sequence[str] | None, seeds: Sequence[int], *, from_scratch: bool
) -> list[Work]:
    """Return the runs that are asked for, one task after another."""
    arms = {"": False, "-from-scratch": True} if from_scratch else {"": False}
    return [
        Work(f"{task.name}-{seed}{arm}", task, seed, options, arms[arm])
        for task, arm, seed in product(tasks_of(tasks), arms, seeds)
    ]


def with_rate(lm: GlueModel, out: Path, options: GlueOptions) -> tuple[GlueOptions, str]:
    """Return options with rate and warm-up, and where these come from."""
    path = out / SEARCH / SEARCH_FILE
    rate, warmup = CHOSEN.get(lm.model.config.model_type, CHOSEN["llama"])
    said = "the source's"
    if path.is_file():
        found = read_note(path, path.parent, model=lm.identity)
        check_json(found, {"learning_rate": float, "warmup": float}, str(path))
        rate, warmup, said = found["learning_rate"], found["warmup"], "searched"
    if options.learning_rate is not None or options.warmup is not None:
        said = "given"
    rate = rate if options.learning_rate is None else options.learning_rate
    warmup = warmup if options.warmup is None else options.warmup
    return replace(options, learning_rate=rate, warmup=warmup), said


def search(
    lm: GlueModel,
    out: Path,
    options: GlueOptions,
    seed: int = 0,
    progress: Reporter = SILENT,
    rates: Sequence[float] = RATES,
) -> dict[str, Any]:
    """Choose rate and warm-up by the mean dev accuracy on SST-2 and MNLI, and keep the choice.

    Of ``rates``, the source's or some of them. A run that diverges counts as 0. It raises as
    :func:`run_glue`, and goes on like it.
    """
    place = out / SEARCH
    options = replace(options, learning_rate=None, warmup=None, test=False)
    wanted = runs_searched(options, seed, rates)
    with writing(place / SEARCH_FILE):
        runs = _make_runs(lm, place, options, wanted, progress, may_diverge=True)
        tried: dict[Any, dict[str, Any]] = {}
        for work, run in zip(wanted, runs, strict=True):
            chosen = {name: getattr(work.options, name) for name in ("learning_rate", "warmup")}
            found = tried.setdefault(work.options, chosen)
            found[work.task.name] = max(run["dev_history"], default=0.0)
        best = max(tried.values(), key=lambda one: one["sst2"] + one["mnli"])
        result = options.note(lm) | {"seed": seed} | best | {"tried": list(tried.values())}
        keep_json(place / SEARCH_FILE, result)
    return result


def runs_searched(options: GlueOptions, seed: int, rates: Sequence[float] = RATES) -> list[Work]:
    """Return the runs of a search: SST-2 and MNLI at every rate and both warm-ups of the source."""
    return [
        Work(f"{task.name}-{seed}-{rate:g}-{warmup:g}", task, seed, at_rate)
        for task, rate, warmup in product(tasks_of(SEARCHED), rates, WARMUPS)
        for at_rate in [replace(options, learning_rate=rate, warmup=warmup)]
    ]


def _read_task(lm: GlueModel, task: Task, options: GlueOptions) -> Data:
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


def _make_runs(
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
                name, data = work.task.name, _read_task(lm, work.task, options)
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
