"""How long attribution takes beside generation, and from a large lens.

    python -m benchmarks.attribution.latency MODEL --called NAME
    python -m benchmarks.attribution.latency MODEL --called NAME --large 100000000 --work DIR

MODEL is a model directory with a lens that has cells, of a corpus that is still there. The large
lens is that of its text repeated, in any code; DIR has it for as long as it is measured. Other
models keep what an earlier run found.
"""

from __future__ import annotations

import shutil
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
from benchmarks.shared.turns import in_turns
from prismlm.explain.attribution import attribute, carriers_of
from prismlm.files import read_json, write_json
from prismlm.lens import layout, suffixes
from prismlm.lens.cell_files import DOCUMENTS_AT_ONCE
from prismlm.lens.cells import group_members
from prismlm.lens.lens import Lens

GENERATED, SAMPLES = 50, 60
TOKENS_TIMED, TEXT_TOKENS, RANGES_AT_ONCE = 1_000, 50, 2_000
PROMPT = "Once upon a time there was a little girl who lived"


def time_generation(lm: prismlm.PrismLM, rounds: int) -> dict[str, Any]:
    """Time generation with and without attribution, in turns, on the same prompt."""

    def explained(read: bool = False, steps: bool = False) -> None:
        trace = lm.explain(PROMPT, generate=GENERATED)
        if read:
            trace.sources("source")
            trace.documents(10)
            trace.passages(10)
        if steps:
            # Steps are built when the first of them is looked at.
            _ = trace[0].prototypes

    arms: dict[str, Callable[[], object]] = {
        "plain": lambda: lm.generate(PROMPT, tokens=GENERATED),
        "attributed": lambda: explained(read=True),
        "parts_alone": explained,
        "with_steps": lambda: explained(read=True, steps=True),
    }
    times = in_turns(arms, rounds, "cpu").elapsed
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


def enlarge(lens: Lens, out: Path, wanted: int) -> None:
    """Write the lens of a text of ``wanted`` positions: that of ``lens``, again and again."""
    cells, factor = lens.cells, -(-wanted // len(lens.cells))
    large = ("cells*", "cell-keys*", "cell-starts*", "cell-documents*", "suffixes*")
    shutil.copytree(lens.path, out, ignore=shutil.ignore_patterns(*large))
    keys, starts = cells.keys_and_starts
    documents = cells.documents.take(np.arange(len(cells.documents)))
    length = int(cells.starts[-1] + cells.lengths[-1])
    bounds = np.append(starts, len(cells))
    dtype = cells.records(np.arange(0)).dtype
    with layout.array_file(out / layout.CELLS_FILE, dtype) as append:
        for first in range(0, len(keys), RANGES_AT_ONCE):
            begins = bounds[first : first + RANGES_AT_ONCE + 1].astype(np.int64)
            owner, within = group_members(np.diff(begins) * factor)
            copy, row = np.divmod(within, np.diff(begins)[owner])
            records = cells.records(begins[owner] + row)
            records["position"] += (copy * length).astype(records["position"].dtype)
            append(records)
    np.save(out / layout.CELL_KEYS_FILE, keys)
    np.save(out / layout.CELL_STARTS_FILE, starts * factor)
    copies = np.repeat(np.arange(factor), documents.num_rows)
    many = pa.concat_tables([documents] * factor)
    ids = [f"{one}-{n}" for one, n in zip(many["doc_id"].to_pylist(), copies, strict=True)]
    begin = many["start"].to_numpy() + copies * length
    columns = {"doc_id": pa.array(ids), "start": pa.array(begin)}
    for name, column in columns.items():
        many = many.set_column(many.schema.get_field_index(name), many.schema.field(name), column)
    path = out / layout.CELL_DOCUMENTS_FILE
    layout.write_table(many, path, row_group_size=DOCUMENTS_AT_ONCE)
    tokens = np.load(lens.path / suffixes.TOKENS_FILE)
    np.save(out / suffixes.TOKENS_FILE, np.tile(tokens, factor))
    table = np.tile(np.load(lens.path / suffixes.DOCUMENTS_FILE), factor)
    np.save(out / suffixes.DOCUMENTS_FILE, table + np.outer([len(tokens), length, 0], copies))
    files, meta = layout.describe_files(out), lens.meta
    layout.write_prototypes(lens.prototypes, out / layout.PROTOTYPES_FILE, files)
    one_range = {name: value for name, value in meta.cells.items() if name != "ranges"}
    one_range["rows"] = len(cells) * factor
    meta = replace(meta, cells=one_range, files=files, corpus_path=str(out / "none"))
    layout.write_meta(out, meta)


def time_tokens(lm: prismlm.PrismLM, texts: list[str]) -> dict[str, Any]:
    """Time what single tokens rely on: shares by source, ten documents and ten passages.

    Each is asked about twice: ``first`` is elapsed time, with what has to be read from the disk,
    ``again`` the time of the processor.
    """
    lens = lm.lens_for("latency")
    split = [lm.explain(text).predictions for text in texts]
    single = [one[[t]] for one in split for t in range(len(one) - 1)][:TOKENS_TIMED]
    times: dict[str, list[float]] = {}
    for name, clock in (("first", time.perf_counter), ("again", time.process_time)):
        times[name] = []
        for prediction in single:
            began = clock()
            attribution = attribute(carriers_of(prediction, lens), lens)
            attribution.sources("source")
            attribution.documents(10)
            attribution.passages(10)
            times[name].append(1000 * (clock() - began))
    size = sum(path.stat().st_size for path in lens.path.iterdir())
    row = {"positions": len(lens.cells), "codes": lens.cells.meta.codes, "bytes": size}
    return row | {name: np.percentile(v, [50, 99]).tolist() for name, v in times.items()}


def time_large(lm: prismlm.PrismLM, path: Path, wanted: int, work: Path) -> list[dict[str, Any]]:
    """Time tokens with the lens of a model, and with one of ``wanted`` positions."""
    lens = lm.lens_for("latency")
    assert lens.corpus is not None
    lengths = lens.corpus.lengths
    numbers = [n for n in lens.corpus.split("all").tolist() if lengths[n] > TEXT_TOKENS]
    starts = lens.corpus.starts[numbers[:: max(1, len(numbers) // 25)]].tolist()
    texts = [lens.corpus.excerpt(start, TEXT_TOKENS) for start in starts]
    with tempfile.TemporaryDirectory(dir=work) as directory:
        enlarge(lens, Path(directory) / "large", wanted)
        large = prismlm.load(path, lens=Path(directory) / "large")
        return [time_tokens(one, texts) for one in (lm, large)]


def main() -> None:
    """Measure and write the result."""
    parser = script_options(__doc__, RESULTS / "attribution_latency.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("--called", default="the demo's kind of model", help="on the page")
    parser.add_argument("--rounds", type=int, default=SAMPLES)
    parser.add_argument("--large", type=int, help="positions of a large lens")
    parser.add_argument("--work", type=Path, help="for the large lens")
    args = parser.parse_args()
    lm = prismlm.load(args.model)
    assert lm.lens is not None
    assert lm.lens.corpus is not None, "the corpus of the lens is not where it was"
    section = "large" if args.large else "generation"
    if args.large:
        row: dict[str, Any] = {"tokens": time_large(lm, args.model, args.large, args.work)}
    else:
        row = time_generation(lm, args.rounds)
    row |= {"model": args.called, "environment": environment()}
    result = read_json(args.out) if args.out.is_file() else {}
    others = [one for one in result.get(section, []) if one["model"] != row["model"]]
    result[section] = sorted([*others, row], key=lambda one: one.get("parameters", 0))
    write_json(args.out, result)
    print(row)


if __name__ == "__main__":
    main()
