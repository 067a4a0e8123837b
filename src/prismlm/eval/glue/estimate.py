"""What a study on GLUE would take, from a few timed steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.eval.glue.classifier import ROWS, GlueModel
from prismlm.eval.glue.fine_tune import EVALUATIONS, Examples, trainer
from prismlm.eval.glue.report import RUNS
from prismlm.eval.glue.runs import GlueOptions, Work, read_task

BYTES_PER_ROW = 40  # of a kept answer and its label, as indented JSON
BASIS = "A few steps and batches were timed; no run is taken to stop before its last epoch."


def estimate_glue(lm: GlueModel, out: Path, options: GlueOptions, wanted: Sequence[Work]) -> Cost:
    """Return what runs that ``out`` lacks would take; writes nothing.

    The figures are ``runs``, ``steps`` and ``tokens``, these counted without padding, with
    ``tokens_per_second`` of training.

    Raises:
        InputError, FormatError: as :func:`prismlm.eval.glue.study.run_glue`.
    """
    left = [work for work in wanted if not (out / RUNS / f"{work.name}.json").is_file()]
    steps = trained = read = disk = 0
    examples: list[Examples] = []
    for task in {work.task.name: work.task for work in left}.values():
        data = read_task(lm, task, options)
        sizes = {name: sum(map(len, rows)) for name, rows in data.tokens.items()}
        dev = sizes["dev"] * options.epochs * EVALUATIONS
        for work in (work for work in left if work.task == task):
            train = data.training(options.limit, work.seed)
            steps += options.settings.steps(len(train.rows))
            trained += options.epochs * sum(map(len, train.rows))
            read += dev + sum(sizes.values()) - sizes["train"]
            disk += BYTES_PER_ROW * sum(
                len(rows) for n, rows in data.tokens.items() if n != "train"
            )
            examples.append(train)
    rates = [
        rate_of(_work(lm, left, examples, options, train=train)) if left else 0.0
        for train in (True, False)
    ]
    seconds = trained / rates[0] + read / rates[1] if left else 0.0
    figures = {"runs": len(left), "steps": steps, "tokens": trained + read}
    figures |= {"tokens_per_second": rates[0]}
    return Cost(seconds, peak_memory(lm.model.device.type), disk, figures, basis=BASIS)


def _work(
    lm: GlueModel,
    left: Sequence[Work],
    examples: Sequence[Examples],
    options: GlueOptions,
    *,
    train: bool,
) -> Iterator[int]:
    """Take a step, or read a batch, of one run after another, and say of how many tokens."""
    for work, rows in zip(left, examples, strict=True):
        classifier = lm.classifier(work.task, work.seed)
        step = trainer(classifier, options.settings, 10)
        for size in (options.batch_size,) * 3 if train else (ROWS,) * 3:
            batch = Examples(rows.rows[:size], rows.labels[:size])
            step(batch) if train else classifier.predict(batch.rows)
            yield sum(map(len, batch.rows))
