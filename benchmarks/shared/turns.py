"""Forms of one thing timed in turns, part by part."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.shared.environment import environment
from benchmarks.shared.options import script_options
from prismlm.allocator import keep_freed_memory
from prismlm.files import read_json, write_json
from prismlm.statistics import interval_of

MIB = 2**20


class Turns(NamedTuple):
    """Seconds of every form in every round after a warm-up, and why others were not timed."""

    elapsed: dict[str, list[float]]
    failed: dict[str, str]


def in_turns(forms: Mapping[str, Callable[[], object]], rounds: int, device: str) -> Turns:
    """Run every form once, then once a round; a form that a GPU has no room for drops out.

    Each round begins with another form, so that none is always the one after another.
    """
    turns = Turns({}, {})
    for name, form in forms.items():
        try:
            form()
            synchronise(device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            turns.failed[name] = "does not fit into the memory"
    left = [name for name in forms if name not in turns.failed]
    turns.elapsed.update({name: [] for name in left})
    for first in range(rounds):
        begin = first % max(1, len(left))
        for name in left[begin:] + left[:begin]:
            began = time.perf_counter()
            forms[name]()
            synchronise(device)
            turns.elapsed[name].append(time.perf_counter() - began)
    return turns


def synchronise(device: str) -> None:
    """Wait until a GPU has done what it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the median of over / under by rounds, and its 95 % interval over resampled rounds."""
    quotients = np.array(over) / np.array(under)
    middle = interval_of(lambda rounds: np.median(quotients[rounds], axis=-1), len(quotients))
    return {
        "ratio": round(middle.value, 4),
        "low": round(middle.low, 4),
        "high": round(middle.high, 4),
    }


def against(turns: Turns, name: str) -> dict[str, dict[str, float]]:
    """Return every other form's time over that of ``name``."""
    seconds = turns.elapsed
    if name not in seconds:
        return {}
    return {other: ratios(t, seconds[name]) for other, t in seconds.items() if other != name}


def milliseconds(turns: Turns) -> dict[str, float]:
    """Return the median of every form."""
    return {name: round(1e3 * float(np.median(t)), 3) for name, t in turns.elapsed.items()}


# -- scripts that time things in parts


def parts_parser(
    description: str | None, parts: Iterable[str], *, rounds: int, out: Path
) -> argparse.ArgumentParser:
    """Return a parser of device, parts, sizes, rounds, threads, dtypes and the file."""
    parser = script_options(description, out)
    names = list(parts)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    return parser


class Setting(NamedTuple):
    """What a part is run with; ``sizes`` are the script's own."""

    sizes: Any
    rounds: int
    device: str
    dtype: str


def compared(turns: Turns, name: str, **row: Any) -> dict[str, Any]:
    """Return a row: medians, ratios to ``name``, what did not fit; and print its ratios."""
    ratios = against(turns, name)
    shown = {other: f"{ratio['ratio']:.3g}" for other, ratio in ratios.items()}
    print(", ".join(f"{k} {v}" for k, v in row.items()), shown | turns.failed, flush=True)
    times = {"milliseconds": milliseconds(turns), "ratios": {"elapsed": ratios}}
    return row | times | {"skipped": turns.failed}


def run_parts(
    args: argparse.Namespace, parts: Mapping[str, Callable[[Setting], list[Any]]], sizes: Any
) -> None:
    """Run the parts and write each once it is measured; the file's other parts stay."""
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
        keep_freed_memory()
    dtypes = args.dtypes or {"cpu": ["float32"], "cuda": ["float32", "bfloat16"]}[args.device]
    result = read_json(args.out) if args.out.is_file() else {"parts": {}}
    for part in args.parts:
        rows = [
            row | {"dtype": dtype}
            for dtype in dtypes
            for row in parts[part](Setting(sizes, args.rounds, args.device, dtype))
        ]
        where = {"environment": environment(args.device), "rounds": args.rounds}
        result["parts"][part] = where | {"rows": rows}
        write_json(args.out, result)
