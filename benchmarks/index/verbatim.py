"""Time verbatim search, and the sorting of its text.

    python -m benchmarks.index.verbatim --work DIR [--tokens N …]

The text is synthetic: tokens by Zipf's law in documents of 500, one in twenty a copy of another.
The largest takes 2 GB of DIR, removed again; texts of other sizes keep what an earlier run found,
and so do rows of an earlier version, which sorted on disk with infini-gram.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import read_json, write_json
from prismlm.lens import suffixes
from prismlm.lens.suffixes import Suffixes

TOKENS = [10**7, 10**8, 2**28]
VOCABULARY, DOCUMENT, COPIED = 50_000, 500, 20
LOOKUPS, COLD, LENGTH = 1000, 20, 32


def corpus_of(tokens: int) -> Any:
    """Return what a verbatim index needs of a corpus."""
    generator, count = np.random.default_rng(0), tokens // DOCUMENT
    shares, documents = np.cumsum(1 / np.arange(1, VOCABULARY)), np.empty((count, DOCUMENT), "u2")
    for number, row in enumerate(documents):
        row[:] = 1 + np.searchsorted(shares, generator.random(DOCUMENT) * shares[-1])
        if number and number % COPIED == 0:
            row[:] = documents[generator.integers(number)]
    documents[:, -1] = 0
    return SimpleNamespace(
        meta={"dtype": "uint16"},
        lengths=np.full(count, DOCUMENT),
        starts=np.arange(count) * DOCUMENT,
        split=lambda name: np.arange(count),
        tokens=lambda start, length: documents.reshape(-1)[start : start + length],
    )


def percentiles(opened: Any, queries: list[Any], clock: Any = process_time) -> list[float]:
    """Return the median and 99th percentile of look-ups, in milliseconds; each opened anew."""
    times: list[float] = []
    for query in queries:
        look_up, began = opened(), clock()
        look_up(query)
        times.append(1000 * (clock() - began))
        del look_up  # Files that are mapped stay in memory.
    return np.percentile(times, [50, 99]).tolist()


def evicted(directory: Path) -> Any:
    """Drop the files from the system's memory, and open them."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return Suffixes(directory).count


def measure(work: Path, tokens: int) -> dict[str, Any]:
    """Sort a text, and look up what it says at random positions."""
    corpus, directory, began = corpus_of(tokens), work / "lens", sum(os.times()[:4])
    directory.mkdir(parents=True)
    for number in range(suffixes.count_parts(corpus, "all")):
        suffixes.write_part(directory, corpus, "all", number)
    suffixes.finish(directory, corpus, "all")
    seconds, search = sum(os.times()[:4]) - began, Suffixes(directory)
    disk = sum(512 * path.stat().st_blocks for path in directory.iterdir())
    starts = np.random.default_rng(1).integers(0, tokens - LENGTH, LOOKUPS).tolist()
    long = [corpus.tokens(start, LENGTH) for start in starts]
    short = [query[: 1 + number % 8] for number, query in enumerate(long)]
    row: dict[str, Any] = {"tokens": tokens, "parts": len(search._parts), "on_disk": False}
    row |= {"cpu_seconds_per_10M": seconds * 1e7 / tokens, "bytes_per_token": disk / tokens}
    row["count_ms"] = percentiles(lambda: search.count, short)
    row["longest_prefix_ms"] = percentiles(lambda: search.longest_prefix, long)
    row["first_five_ms"] = percentiles(lambda: partial(search.find, limit=5), short)
    del search
    row["cold_count_ms"] = percentiles(lambda: evicted(directory), short[:COLD], perf_counter)
    shutil.rmtree(directory)
    return row


def main() -> None:
    """Measure each arm in a process of its own, and write the result."""
    parser = script_options(__doc__, RESULTS / "verbatim.json")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    args = parser.parse_args()
    before = read_json(args.out)["rows"] if args.out.is_file() else []
    rows = [row for row in before if row["on_disk"] or row["tokens"] not in args.tokens]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        rows += [pool.submit(measure, args.work, tokens).result() for tokens in args.tokens]
    rows.sort(key=lambda row: (row["tokens"], row["on_disk"], row["parts"]))
    write_json(args.out, {"rows": rows, "lookups": LOOKUPS, "environment": environment()})


if __name__ == "__main__":
    main()
