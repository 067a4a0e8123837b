"""Write the cells of synthetic corpora of growing size, and read them as questions do.

    python -m benchmarks.index.scale LENS --positions 1e6 1e7 --work DIR

Positions are drawn from those of a lens, such as the demo's, so that cells, next tokens and codes
have its distribution. Forward passes are left out: workers spool the positions of parts, sort them,
and write ranges of cells, as `prismlm index --workers` does. A question reads the positions with
one next token in 16 cells, warm, and cold after the kernel has dropped the files from memory. 10⁹
and 10¹² positions are computed from the largest size. Writes docs/results/scale.json; sizes that
are not run again stay.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.__main__ import set_environment
from prismlm.files import read_json, write_json
from prismlm.lens import layout
from prismlm.lens.assembly import CENTRES, Assembly
from prismlm.lens.cell_files import cells_format, spooled_type, write_run
from prismlm.lens.cells import Cells, check_codes, neighbours
from prismlm.lens.options import IndexOptions
from prismlm.lens.scan import POSITIONS_FILE, Scan
from prismlm.ops import top_contexts
from prismlm.parts import Parts
from prismlm.run_state import RUN_FILE

PART_POSITIONS, RANGE_BYTES, AT_ONCE = 2**22, 2**26, 2**18
WORKERS, CELLS_OF_QUESTION, QUESTIONS = (1, 2), 16, {"warm": 500, "cold": 100}
COMPUTED = {10**9: 64, 10**12: 4096}  # positions and workers


def main() -> None:
    """Measure each size."""
    parser = script_options(__doc__, RESULTS / "scale.json")
    parser.add_argument("lens", type=Path)
    parser.add_argument("--positions", type=float, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--work", type=Path, required=True, help="a directory for 200 B a position")
    args = parser.parse_args()
    set_environment()
    torch.set_num_threads(1)
    before = read_json(args.out) if args.out.exists() else {}
    rows = before.get("measured", [])
    for size in map(int, args.positions):
        row = measured(args.lens.absolute(), args.work.absolute() / "scale", size)
        rows = [row, *(r for r in rows if r["positions"] != size)]
        rows.sort(key=itemgetter("positions"))
        computed = [extrapolated(rows[-1], *of) for of in COMPUTED.items()]
        write_json(args.out, before | {"measured": rows, "computed": computed})
        print(row)


def measured(source: Path, work: Path, positions: int) -> dict[str, Any]:
    """Return time, memory, bytes and latency of one size; its files are removed."""
    shutil.rmtree(work, ignore_errors=True)
    count = max(2, -(-positions // PART_POSITIONS))
    parts = Parts(work / "lens", count)
    (parts.path / CENTRES).mkdir(parents=True)
    shutil.copy(source / layout.CELL_CENTRES_FILE, parts.path / CENTRES)
    spooling = run(partial(spool_part, source, parts, positions), count, max(WORKERS))
    spooled = sum(path.stat().st_size for path in parts.path.glob(f"part-*/{POSITIONS_FILE}"))
    assembly, sorting = Assembly(parts, None, IndexOptions(range_bytes=RANGE_BYTES)), []
    for workers in WORKERS:
        for job in assembly.jobs:
            shutil.rmtree(job.directory, ignore_errors=True)
        sorting.append(run(assembly, len(assembly.jobs), workers))
    parts.out.mkdir()
    entry, described = assembly.collect(parts.out)
    shutil.rmtree(parts.path)
    latency = {kind: asked(parts.out, entry, source, kind) for kind in QUESTIONS}
    shutil.rmtree(work)
    return {
        "positions": positions,
        "spooled_bytes": spooled,
        "lens_bytes": sum(file["bytes"] for file in described.values()),
        "spooling": spooling,
        "sorting": sorting,
        "latency_ms": latency,
        "environment": environment(),
    }


def run(work: Callable[..., Any], count: int, workers: int) -> dict[str, Any]:
    """Do jobs in processes of their own; return seconds and the largest memory of one."""
    began = time.perf_counter()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        rows = list(pool.map(partial(timed, work), range(count), [count] * count))
    return {
        "workers": workers,
        "wall_seconds": time.perf_counter() - began,
        "cpu_seconds": sum(seconds for seconds, _ in rows),
        "memory_bytes": max(peak for _, peak in rows),
    }


def timed(work: Callable[..., Any], number: int, count: int) -> tuple[float, int]:
    """Return the CPU seconds of a job, and the peak of its memory beyond what it begins with."""
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, began = memory("VmRSS"), time.process_time()
    work(None, number, count)
    return time.process_time() - began, memory("VmHWM") - before


def memory(name: str) -> int:
    """Return a figure of this process in bytes; pages of mapped files count."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def spool_part(source: Path, parts: Parts, total: int, _: Any, number: int, count: int) -> None:
    """Write a part of as many positions, drawn from a lens by the number of the part."""
    meta, generator = layout.read_meta(source), np.random.default_rng(number)
    cells = Cells(source, meta.cells)
    keys, starts = cells.keys_and_starts
    width, vocabulary = cells.meta.width, cells.meta.vocabulary
    made = cells_format(width, vocabulary, total, check_codes(cells.meta.codes))
    dtype, prototypes = spooled_type(made), 1 + int(keys[-1]) // vocabulary
    directory = parts.part(number)
    directory.mkdir()

    def read() -> Iterator[np.ndarray]:
        for first in range(total * number // count, total * (number + 1) // count, AT_ONCE):
            rows = generator.integers(
                len(cells), size=min(AT_ONCE, total * (number + 1) // count - first)
            )
            records, drawn = np.empty(len(rows), dtype), cells.records(rows)
            key = np.asarray(keys)[np.searchsorted(starts, rows, side="right") - 1]
            records["cell"], records["token"] = np.divmod(key, vocabulary)
            for name in drawn.dtype.names or ():
                records[name] = drawn[name]
            records["position"] = np.arange(first, first + len(rows))
            yield records

    write_json(directory / RUN_FILE, {})
    top, none = top_contexts.empty(prototypes, 1), torch.zeros(prototypes)
    scan = Scan(top, none, torch.zeros(1), torch.zeros(1), none, torch.tensor(0))
    written = write_run(directory / POSITIONS_FILE, read(), dtype, prototypes)
    scan.save(directory, written, made)


def asked(lens: Path, entry: dict[str, Any], source: Path, kind: str) -> dict[str, float]:
    """Return percentiles of the milliseconds of questions about one next token in 16 cells."""
    generator, files = np.random.default_rng(0), list(lens.iterdir())
    known = Cells(source, layout.read_meta(source).cells)
    keys, starts = known.keys_and_starts
    cell, token = np.divmod(np.asarray(keys), known.meta.vocabulary)
    weights = np.diff(np.append(starts, len(known))) / len(known)
    cells, milliseconds = Cells(lens, entry), []
    query = np.zeros(CELLS_OF_QUESTION, np.int64)
    for _ in range(QUESTIONS[kind]):
        target = token[generator.choice(len(token), p=weights)]
        # Those that have it most, then others, which a prediction of it may also rely on.
        having = np.flatnonzero(token == target)
        having = having[np.argsort(-weights[having])][:CELLS_OF_QUESTION]
        others = generator.integers(cell[-1] + 1, size=CELLS_OF_QUESTION - len(having))
        chosen = np.append(cell[having], others)
        state = normalize(torch.from_numpy(generator.normal(size=(1, known.meta.width))).float())
        pair = chosen, np.full(CELLS_OF_QUESTION, target)
        if kind == "cold":
            del cells
            for path in files:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            cells = Cells(lens, entry)
        began = time.perf_counter()
        neighbours(cells, query, *pair, state)
        milliseconds.append(1000 * (time.perf_counter() - began))
    p50, p99 = np.percentile(milliseconds, [50, 99]).tolist()
    return {"p50": p50, "p99": p99, "questions": len(milliseconds)}


def extrapolated(row: dict[str, Any], positions: int, workers: int) -> dict[str, Any]:
    """Compute another size from a measured one: all but memory is linear in the positions."""
    factor = positions / row["positions"]
    seconds = row["spooling"]["cpu_seconds"] + row["sorting"][0]["cpu_seconds"]
    return {
        "positions": positions,
        "workers": workers,
        "spooled_bytes": row["spooled_bytes"] * factor,
        "lens_bytes": row["lens_bytes"] * factor,
        "cpu_hours": seconds * factor / 3600,
        "hours_of_a_worker": seconds * factor / workers / 3600,
    }


if __name__ == "__main__":
    main()
