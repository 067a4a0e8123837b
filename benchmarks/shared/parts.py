"""What scripts that time things in parts share: their options, and writing each part."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.environment import environment, machine
from benchmarks.shared.options import script_options
from prismlm.allocator import keep_freed_memory
from prismlm.files import read_json, write_json


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
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["float32", "bfloat16"],
        help="bfloat16: autocast in training",
    )
    return parser


def rounds_of(part: str, args: argparse.Namespace) -> int:
    """Return the rounds of a part, which may have an option of its own."""
    return getattr(args, f"{part}_rounds", None) or args.rounds


def run_parts(
    args: argparse.Namespace,
    rows_of: Callable[[str, str], Iterable[dict[str, Any]]],
    **how: object,
) -> None:
    """Run the parts and write each once it is measured; the file's other parts stay.

    ``rows_of`` returns the rows of a part in a dtype; ``how`` is noted with each part.
    """
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
        keep_freed_memory()
    dtypes = args.dtypes or {"cpu": ["float32"], "cuda": ["float32", "bfloat16"]}[args.device]
    result = read_json(args.out) if args.out.is_file() else {"parts": {}}
    for part in args.parts:
        load = os.getloadavg()[0]
        rows = [row | {"dtype": dtype} for dtype in dtypes for row in rows_of(part, dtype)]
        where = environment() | machine(args.device)
        where |= {"load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}
        noted = {"environment": where, "run_began": began, "rounds": rounds_of(part, args)}
        noted |= {**how, "rows": rows}
        result["parts"][part] = noted
        write_json(args.out, result)
