"""How long attribution takes: one token from a lens, and beside generation.

    python -m benchmarks.attribution.latency MODEL --large 100000000 --work DIR

MODEL is a model directory with a lens that has cells, of a corpus that is still there. The large
lens has the ranges of that one, each so many times as large; it takes 190 bytes a position of DIR
twice while it is written, and is removed again. Sizes that are not timed keep what an earlier run
found.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.explain.attribution import attribute
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.passages import PositionAttribution
from prismlm.explain.positions import DocumentsSoFar
from prismlm.files import read_json
from prismlm.index import layout
from prismlm.index.lens import Lens
from prismlm.index.sort_cells import Spool, write_cells
from prismlm.progress import SILENT

DOCUMENTS, DOCUMENT_TOKENS = 200_000, 100_000
RANGES_AT_ONCE = 4_000
TOKENS_TIMED = 1_000
GENERATED, SAMPLES = 50, 60
PROMPT = "Once upon a time there was a little girl who lived"


def texts_of(lm: prismlm.PrismLM, corpus: Corpus, count: int) -> list[list[EvidenceTable]]:
    """Return the evidence of so many single predictions along held-out texts."""
    found: list[list[EvidenceTable]] = []
    for document in corpus.split("heldout").tolist():
        length = min(60, int(corpus.lengths[document]) - 1)
        trace = lm.explain(corpus.excerpt(int(corpus.starts[document]), length))
        every = range(min(len(trace) - 1, count - sum(map(len, found))))
        found.append([trace.table.apart(slice(t, t + 1)) for t in every])
        if sum(map(len, found)) >= count:
            break
    return found


def time_tokens(texts: list[list[EvidenceTable]], lens: Lens) -> dict[str, Any]:
    """Time what is told of single tokens: shares by source, ten documents and ten passages.

    Every token is asked about once before, so that what it needs has been read from the disk. What
    carried its text before is known, as while a text is written.
    """
    assert lens.cells is not None
    times: dict[str, list[float]] = {"first": [], "warm": [], "warm_cpu": []}
    for again in (False, True):
        for tables in texts:
            so_far = DocumentsSoFar(lens.cells)
            for table in tables:
                began, began_cpu = time.perf_counter(), time.process_time()
                found = attribute(table, lens, so_far=so_far)
                assert isinstance(found, PositionAttribution)
                found.sources("source")
                found.documents(10)
                found.passages(10)
                ended, ended_cpu = time.perf_counter(), time.process_time()
                times["warm" if again else "first"].append(ended - began)
                if again:
                    times["warm_cpu"].append(ended_cpu - began_cpu)
    rows: dict[str, Any] = {name: percentiles(values) for name, values in times.items()}
    return rows | {"environment": environment()}


def enlarged(lens: Lens, directory: Path, wanted: int) -> Lens:
    """Write a lens of ``wanted`` positions: each range of a real one, so many times as large.

    States are those of the range's own positions with noise, positions are random.
    """
    assert lens.cells is not None
    cells = lens.cells
    factor = -(-wanted // len(cells))
    generator = np.random.default_rng(0)
    spool = Spool(directory / "positions", cells.meta.width)
    keys, starts = cells.keys_and_starts
    bounds = np.append(starts, len(cells))
    for first in range(0, len(keys), RANGES_AT_ONCE):
        last = min(len(keys), first + RANGES_AT_ONCE)
        rows = np.arange(bounds[first], bounds[last])
        sizes = np.diff(bounds[first : last + 1])
        records = cells.records(rows)
        many = np.empty(factor * len(rows), spool.dtype)
        owner = np.repeat(keys[first:last], sizes)
        for name, column in (
            ("cell", owner // cells.meta.vocabulary),
            ("token", owner % cells.meta.vocabulary),
            ("read", records["read"]),
            ("probability", records["probability"]),
            ("scale", records["scale"]),
        ):
            many[name] = np.tile(column, factor)
        noise = generator.integers(-3, 4, size=(len(many), cells.meta.width), dtype=np.int8)
        many["code"] = np.clip(
            np.tile(records["code"], (factor, 1)).astype(np.int16) + noise, -127, 127
        )
        many["position"] = generator.integers(0, DOCUMENT_TOKENS * DOCUMENTS, size=len(many))
        spool.add(many)
        spool.flush()
    meta = write_cells(directory, [spool], lens.num_prototypes, cells.meta.vocabulary, 1.0, SILENT)
    spool.path.unlink()
    starts = np.arange(DOCUMENTS) * DOCUMENT_TOKENS
    of = generator.integers(cells.documents.num_rows, size=DOCUMENTS)
    table = cells.documents.take(pa.array(of)).set_column(6, "start", pa.array(starts))
    table = table.set_column(7, "length", pa.array(np.full(DOCUMENTS, DOCUMENT_TOKENS)))
    ids = pa.array([f"document-{number}" for number in range(DOCUMENTS)])
    layout.write_table(table.set_column(0, "doc_id", ids), directory / layout.CELL_DOCUMENTS_FILE)
    files = layout.describe_files(directory)
    return Lens(directory, replace(lens.meta, cells=meta, files=files), lens.head)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return p50, p99 and the largest, in milliseconds."""
    ms = 1000 * np.array(seconds)
    return {
        "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)),
        "max_ms": float(ms.max()),
    }


def time_generation(lm: prismlm.PrismLM, rounds: int) -> dict[str, Any]:
    """Time generation with and without attribution, in turns, on the same prompt."""

    def plain() -> None:
        lm.generate(PROMPT, tokens=GENERATED)

    def attributed() -> None:
        trace = lm.explain(PROMPT, generate=GENERATED)
        trace.sources("source")
        trace.documents(10)
        trace.passages(10)

    def parts_alone() -> None:
        lm.explain(PROMPT, generate=GENERATED)

    def with_steps() -> None:
        trace = lm.explain(PROMPT, generate=GENERATED)
        trace.sources("source")
        trace.documents(10)
        trace.passages(10)
        # Steps are built when the first of them is looked at.
        _ = trace[0].prototypes

    arms: dict[str, Callable[[], None]] = {
        "plain": plain,
        "attributed": attributed,
        "parts_alone": parts_alone,
        "with_steps": with_steps,
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    for sample in range(rounds):
        # In turns, and the order itself turns, so that what else runs here meets all alike.
        first = sample % len(arms)
        names = list(arms)[first:] + list(arms)[:first]
        for name in names:
            began = time.perf_counter()
            arms[name]()
            times[name].append(time.perf_counter() - began)
    ratios = {
        name: [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        for name in arms
        if name != "plain"
    }
    return {
        "model_type": lm.model.config.model_type,
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "prototypes": lm.head.num_prototypes,
        "prototypes_per_token": lm.head.prototypes_per_token,
        "tokens": GENERATED,
        "positions": len(lm.lens.cells) if lm.lens and lm.lens.cells else 0,
        "samples": rounds,
        "milliseconds": {k: 1000 * statistics.median(v) for k, v in times.items()},
        "ratio": {
            k: {"median": statistics.median(v), "least": min(v), "most": max(v)}
            for k, v in ratios.items()
        },
    }


def measure(
    model: Path, lens: str | None, large: int, work: Path, *, tokens: bool, rounds: int
) -> dict[str, Any]:
    """Measure both parts, or generation alone."""
    lm = prismlm.load(model, lens=lens)
    assert lm.lens is not None
    assert lm.lens.cells is not None, "the lens has no cells"
    assert lm.lens.corpus is not None, "the corpus of the lens is not where it was"
    if not tokens:
        return {"generation": time_generation(lm, rounds)}
    texts = texts_of(lm, lm.lens.corpus, TOKENS_TIMED)
    result: dict[str, Any] = {
        "environment": environment(),
        "lens": {
            "prototypes": lm.lens.num_prototypes,
            "width": lm.head.width,
            "prototypes_per_token": lm.head.prototypes_per_token,
            "tokens_timed": sum(map(len, texts)),
        },
        "tokens": {str(len(lm.lens.cells)): time_tokens(texts, lm.lens)},
        "generation": time_generation(lm, rounds),
    }
    if large:
        bigger = enlarged(lm.lens, work, large)
        assert bigger.cells is not None
        result["tokens"][str(len(bigger.cells))] = time_tokens(texts, bigger)
        result["bytes"] = sum(path.stat().st_size for path in work.iterdir())
    return result


def main() -> None:
    """Measure and write the result."""
    parser = script_options(__doc__, RESULTS / "attribution_latency.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("--lens", help="where there are several")
    parser.add_argument("--large", type=int, default=0, metavar="N", help="positions; 0: not timed")
    parser.add_argument("--called", default="the demo's kind of model", help="on the page")
    parser.add_argument("--generation-alone", action="store_true", help="leave out single tokens")
    parser.add_argument("--rounds", type=int, default=SAMPLES, help="of generation")
    parser.add_argument("--work", type=Path, help="where the large lens is written; else a tmp")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as temporary:
        result = measure(
            arguments.model,
            arguments.lens,
            arguments.large,
            Path(temporary),
            tokens=not arguments.generation_alone,
            rounds=arguments.rounds,
        )
    before = read_json(arguments.out) if arguments.out.is_file() else {}
    result["tokens"] = before.get("tokens", {}) | result.get("tokens", {})
    row = result["generation"] | {"model": arguments.called, "environment": environment()}
    others = [one for one in before.get("generation", []) if one["model"] != row["model"]]
    result["generation"] = sorted([*others, row], key=lambda one: one["parameters"])
    result = before | result
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
