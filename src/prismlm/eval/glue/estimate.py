"""What a study on GLUE would take, from a few timed steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.eval.glue.classifier import GlueModel
from prismlm.eval.glue.fine_tune import EVALUATIONS, Examples, trainer
from prismlm.eval.glue.report import RUNS
from prismlm.eval.glue.runs import GlueOptions, Work, read_task

BYTES_PER_ROW = 40  # of a kept answer and its label, as indented JSON
BASIS = (
    "A few steps were timed, and reading taken for a third of one; no run is taken to stop before "
    "its last epoch."
)


def estimate_glue(lm: GlueModel, out: Path, options: GlueOptions, wanted: Sequence[Work]) -> Cost:
    """Return what runs that ``out`` lacks would take; writes nothing.

    The figures are ``runs``, ``steps`` and ``tokens`` of both training and reading, these counted
    without padding, with ``tokens_per_second`` of training.

    Raises:
        InputError, FormatError: as :func:`prismlm.eval.glue.study.run_glue`.
    """
    left = [work for work in wanted if not (out / RUNS / f"{work.name}.json").is_file()]
    steps = trained = read = disk = 0
    begun: list[tuple[Work, Examples]] = []
    for task in {work.task.name: work.task for work in left}.values():
        data = read_task(lm, task, options)
        sizes = {name: sum(map(len, rows)) for name, rows in data.tokens.items()}
        answered = sum(len(rows) for name, rows in data.tokens.items() if name != "train")
        for work in (work for work in left if work.task == task):
            train = data.training(options.limit, work.seed)
            steps += work.settings.steps(len(train.rows))
            trained += options.epochs * sum(map(len, train.rows))
            read += options.epochs * EVALUATIONS * sizes["dev"]
            read += sum(sizes.values()) - sizes["train"]
            disk += BYTES_PER_ROW * answered
            begun.append((work, train))
    rate = rate_of(_steps(lm, begun))
    seconds = (trained + read / 3) / rate if begun else 0.0
    figures = {"runs": len(left), "steps": steps, "tokens": trained + read}
    figures |= {"tokens_per_second": rate}
    return Cost(seconds, peak_memory(lm.model.device.type), disk, figures, basis=BASIS)


def _steps(lm: GlueModel, begun: Sequence[tuple[Work, Examples]]) -> Iterator[int]:
    """Take the first steps of one run after another, and say of how many tokens each is."""
    for work, train in begun:
        step = trainer(lm.classifier(work.task, work.seed), work.settings, work.settings.steps(1))
        for first in range(0, 3 * work.settings.batch_size, work.settings.batch_size):
            # Of fewer rows than that, the same again.
            rows = range(first, first + work.settings.batch_size)
            chosen = [row % len(train.rows) for row in rows]
            step(Examples([train.rows[n] for n in chosen], [train.labels[n] for n in chosen]))
            yield sum(len(train.rows[n]) for n in chosen)
