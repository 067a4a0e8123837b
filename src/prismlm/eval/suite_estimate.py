"""What a suite would take, from reading a few of its questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.eval.benchmarks import benchmarks_of
from prismlm.eval.predictors import PredictorLM
from prismlm.eval.suite import TASKS, SuiteOptions, questions_of

BYTES_PER_QUESTION = 120  # of the kept answers of three predictors, as indented JSON


def estimate_suite(
    lm: PredictorLM, out: Path, options: SuiteOptions, tasks: Sequence[str] | None = None
) -> Cost:
    """Return what :func:`prismlm.eval.suite.run_suite` would take; writes nothing.

    The figures are those left to ask: ``tasks``, ``questions`` and ``tokens``, counted exactly, and
    ``tokens_per_second``, timed on a few batches of each length.

    Raises:
        InputError, FormatError: as it.
    """
    names: list[str] = []
    questions = tokens = 0
    sampled: list[tuple[list[int], list[int]]] = []
    for benchmark in benchmarks_of(options.suite, tasks):
        if (out / TASKS / f"{benchmark.name}.json").is_file():
            continue
        asked, _ = questions_of(benchmark, options)
        encoded = [lm.encoded(*pair) for question in asked for pair in question.pairs]
        names.append(benchmark.name)
        questions += len(asked)
        tokens += sum(len(row.ids) for row in lm.rows(encoded))
        sampled += encoded[:: max(1, len(encoded) // int(lm.batch_size))]
    rate = rate_of(_read(lm, sampled))
    return Cost(
        tokens / rate if rate else 0.0,
        peak_memory(),
        questions * BYTES_PER_QUESTION,
        {"tasks": names, "questions": questions, "tokens": tokens, "tokens_per_second": rate},
    )


def _read(lm: PredictorLM, encoded: list[tuple[list[int], list[int]]]) -> Iterator[int]:
    size = int(lm.batch_size)
    # The longest first, as in a run: what it needs at most is allocated now.
    ordered = sorted(encoded, key=lambda pair: -len(pair[0]) - len(pair[1]))
    for first in range(0, len(ordered), size):
        batch = ordered[first : first + size]
        lm.score(batch)
        yield sum(len(row.ids) for row in lm.rows(batch))
