"""Time verbatim search in texts that were sorted in memory and on disk, and the sorting.

    python -m benchmarks.index.verbatim --work DIR

The text is synthetic: tokens by Zipf's law in documents of 500, one in twenty a copy of another.
The largest takes 2 GB of DIR, removed again. ``engine`` is infini-gram's own search, which starts a
thread a part, in what its program sorted.
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
from unittest.mock import patch

import numpy as np

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import write_json
from prismlm.lens import suffixes
from prismlm.lens.layout import numbered
from prismlm.lens.suffixes import ORDER_FILE, TOKENS_FILE, Suffixes

# Tokens, and the parts that they are sorted in on disk; 0 for in memory.
ARMS = [(10**7, 0), (10**7, 1), (10**8, 0), (10**8, 1), (10**8, 4), (10**8, 16), (2**28, 0)]
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


def engine(directory: Path, parts: int) -> Any:
    """Return the search of infini-gram, in a copy of the parts in its format."""
    from infini_gram.engine import InfiniGramEngine

    for part in range(parts):
        tokens, order = (np.load(directory / numbered(n, part)) for n in (TOKENS_FILE, ORDER_FILE))
        tokens.tofile(directory / f"tokenized.{part:05d}")
        (order * np.uint32(tokens.itemsize)).tofile(directory / f"table.{part:05d}")
        (directory / f"offset.{part:05d}").write_bytes(bytes(8))
    return InfiniGramEngine([str(directory)], eos_token_id=0).find


def measure(work: Path, tokens: int, parts: int) -> dict[str, Any]:
    """Sort a text, and look up what it says at random positions."""
    corpus, directory, began = corpus_of(tokens), work / "lens", sum(os.times()[:4])
    directory.mkdir(parents=True)
    sizes: dict[str, Any] = {
        "LARGE": tokens // (parts + 1) if parts else tokens,
        "MAX_PARTS": max(1, parts),
    }
    with patch.multiple(suffixes, **sizes):
        for number in range(suffixes.count_parts(corpus, "all")):
            suffixes.write_part(directory, corpus, "all", number)
        suffixes.finish(directory, corpus, "all")
    seconds, search = sum(os.times()[:4]) - began, Suffixes(directory)
    disk = sum(512 * path.stat().st_blocks for path in directory.iterdir())
    starts = np.random.default_rng(1).integers(0, tokens - LENGTH, LOOKUPS).tolist()
    long = [corpus.tokens(start, LENGTH) for start in starts]
    short = [query[: 1 + number % 8] for number, query in enumerate(long)]
    row: dict[str, Any] = {"tokens": tokens, "parts": len(search._parts), "on_disk": bool(parts)}
    row |= {"cpu_seconds_per_10M": seconds * 1e7 / tokens, "bytes_per_token": disk / tokens}
    row["count_ms"] = percentiles(lambda: search.count, short)
    row["longest_prefix_ms"] = percentiles(lambda: search.longest_prefix, long)
    row["first_five_ms"] = percentiles(lambda: partial(search.find, limit=5), short)
    if parts:
        opened = engine(directory, parts)
        ids = [q.astype(">u2").view("<u2").tolist() for q in short]
        row["engine_count_ms"] = percentiles(lambda: opened, ids)
    del search
    row["cold_count_ms"] = percentiles(lambda: evicted(directory), short[:COLD], perf_counter)
    shutil.rmtree(directory)
    return row


def main() -> None:
    """Measure each arm in a process of its own, and write the result."""
    parser = script_options(__doc__, RESULTS / "verbatim.json")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = [pool.submit(measure, args.work, *arm).result() for arm in ARMS]
    rows.sort(key=lambda row: (row["tokens"], row["on_disk"], row["parts"]))
    write_json(args.out, {"rows": rows, "lookups": LOOKUPS, "environment": environment()})


if __name__ == "__main__":
    main()
