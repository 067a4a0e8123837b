"""What a suite would take, from reading a few of its questions."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prismlm.eval.benchmarks import benchmarks_of
from prismlm.eval.predictors import PredictorLM
from prismlm.eval.suite import TASKS, SuiteOptions, questions_of

SECONDS_MEASURED = 5.0
RSS_UNIT = 1 if sys.platform == "darwin" else 1024
BYTES_PER_QUESTION = 120  # of the kept answers of three predictors, as indented JSON


@dataclass(frozen=True)
class SuiteEstimate:
    """Counted exactly, and timed on a few batches of each length.

    Attributes:
        tasks: that are left to ask.
        questions: of them.
        tokens: to read.
        tokens_per_second: measured here.
        seconds: of all that is left.
        memory_bytes: the most that this process held while it measured.
        disk_bytes: of the answers.
    """

    tasks: list[str]
    questions: int
    tokens: int
    tokens_per_second: float
    seconds: float
    memory_bytes: int
    disk_bytes: int


def estimate_suite(
    lm: PredictorLM, out: Path, options: SuiteOptions, tasks: Sequence[str] | None = None
) -> SuiteEstimate:
    """Return what :func:`prismlm.eval.suite.run_suite` would take; writes nothing.

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
    rate = _tokens_per_second(lm, sampled) if sampled else 0.0
    return SuiteEstimate(
        tasks=names,
        questions=questions,
        tokens=tokens,
        tokens_per_second=rate,
        seconds=tokens / rate if rate else 0.0,
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT,
        disk_bytes=questions * BYTES_PER_QUESTION,
    )


def _tokens_per_second(lm: PredictorLM, encoded: list[tuple[list[int], list[int]]]) -> float:
    size = int(lm.batch_size)
    # The longest first, as in a run: what it needs at most is allocated now.
    ordered = sorted(encoded, key=lambda pair: -len(pair[0]) - len(pair[1]))
    read, began = 0, time.monotonic()
    for first in range(0, len(ordered), size):
        batch = ordered[first : first + size]
        lm.score(batch)
        read += sum(len(row.ids) for row in lm.rows(batch))
        if time.monotonic() - began > SECONDS_MEASURED:
            break
    return read / max(time.monotonic() - began, 1e-9)
