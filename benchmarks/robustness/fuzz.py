"""Random inputs: command lines, calls of the API and damaged files, and how each ends.

python -m benchmarks.robustness.fuzz

A case ends in a right answer, in an error of ours, or
it is a finding: another exception, a wrong answer, a file changed that was not named. With --before
the JSON that the same cases gave on another state of the source is kept beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.robustness import api, command_line, readers
from benchmarks.robustness.world import Finding, Tally, World
from benchmarks.shared.environment import ROOT, environment

RESULTS = ROOT / "docs" / "results" / "robustness_fuzzing.json"
PARTS = ("command line", "api", "readers")


def tally(
    cases: st.SearchStrategy[Any],
    run: Callable[[Any], str | Finding],
    count: int,
    start: int = 0,
) -> Tally:
    """Draw cases and run them; the same for the same count and start.

    Args:
        cases: what to draw from.
        run: runs one and says how it ended.
        count: how many.
        start: of the random numbers.
    """
    found = Tally()

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.large_base_example,
        ],
        derandomize=False,
    )
    @given(cases)
    def each(case: Any) -> None:
        found.note(run(case))

    each()
    return found


def fuzz(part: str, world: World, count: int, start: int = 0) -> Tally:
    """Run cases of a part: command line, api or readers."""
    held = Path.cwd()
    os.chdir(world.root)
    try:
        if part == "api":
            known = api.calls()
            return tally(api.api_calls(known), lambda c: api.run(world, c), count, start)
        if part == "readers":
            return tally(readers.readings(world), readers.Readers(world).run, count, start)
        files = [command_line.files_below(world.root / tree) for tree in ("model", "corpus")]
        lines = command_line.command_lines(*files)
        return tally(lines, lambda line: command_line.run(world, line), count, start)
    finally:
        os.chdir(held)


def main() -> None:
    """Run all parts and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2_000, help="of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, action="append", help="others stay as they are")
    parser.add_argument("--before", type=Path, help="JSON of the same cases on another state")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    kept = options.part and options.out.is_file()
    value: dict[str, Any] = json.loads(options.out.read_text()) if kept else {}
    how = {"environment": environment(), "seed": options.seed}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        world = World(Path(directory) / "world")
        for part in options.part or PARTS:
            begun = time.monotonic()
            found = fuzz(part, world, options.cases, options.seed)
            value[part] = how | found.to_json(time.monotonic() - begun)
            print(part, *found.findings[:3], sep="\n")
    if options.before is not None:
        value |= compared(value, json.loads(options.before.read_text()))
    options.out.write_text(json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def compared(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return each part with the findings of both states: mended are those of the one before."""
    found: dict[str, Any] = {}
    for part in PARTS:
        if part not in now or part not in before:
            continue
        kinds = {one["kind"] for one in now[part]["findings"]}
        gone = [one | {"mended": True} for one in before[part]["findings"]
                if one["kind"] not in kinds]  # fmt: skip
        left = now[part]["findings"]
        counts = {"right answers", "errors of ours", "cases", "environment"}
        earlier = {name: before[part][name] for name in sorted(counts)}
        found[part] = now[part] | {"before": earlier, "findings": left + gone}
    return found


if __name__ == "__main__":
    main()
