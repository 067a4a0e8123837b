"""Random command lines, API calls and damaged files, and how each case ends.

    python -m benchmarks.robustness.fuzz [--part PART] [--cases N] [--seed SEED]

A case ends in a right answer or in an error of prismlm's own. Anything else is a finding: another
exception, a wrong answer, or a changed file that was not named as an output.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.robustness import api, command_line, damaged_files
from benchmarks.robustness.world import Finding, Tally, World
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import read_json, write_json

PARTS = ("command line", "api", "readers")


def tally(
    cases: st.SearchStrategy[Any], run: Callable[[Any], str | Finding], count: int, start: int = 0
) -> Tally:
    """Draw ``count`` cases from the seed ``start``, run each and count how they end."""
    counts = Tally()

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(cases)
    def run_case(case: Any) -> None:
        counts.note(run(case))

    run_case()
    return counts


def fuzz(part: str, world: World, count: int, start: int = 0) -> Tally:
    """Run cases of one of ``PARTS``."""
    directory = Path.cwd()
    os.chdir(world.root)
    try:
        if part == "api":
            cases = api.api_calls(api.calls())
            return tally(cases, lambda call: api.run(world, call), count, start)
        if part == "readers":
            cases = damaged_files.readings(world)
            return tally(cases, lambda reading: damaged_files.run(world, reading), count, start)
        lines = command_line.command_lines()
        return tally(lines, lambda line: command_line.run(world, line), count, start)
    finally:
        os.chdir(directory)


def main() -> None:
    """Run the parts and write the counts of each; other parts of the file stay."""
    parser = script_options(__doc__, RESULTS / "robustness_fuzzing.json")
    parser.add_argument("--cases", type=int, default=2_000, help="of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, action="append")
    args = parser.parse_args()
    result: dict[str, Any] = read_json(args.out) if args.out.is_file() else {}
    shared = {"environment": environment(), "seed": args.seed}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        world = World(Path(directory) / "world")
        for part in args.part or PARTS:
            began = time.monotonic()
            counts = fuzz(part, world, args.cases, args.seed)
            result[part] = shared | counts.to_json(time.monotonic() - began)
            print(part, *counts.findings[:3], sep="\n")
    write_json(args.out, result)


if __name__ == "__main__":
    main()
