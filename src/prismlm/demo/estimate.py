"""What a demo would take, and what of it is there already; nothing is written to its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prismlm.cost import Cost
from prismlm.demo.prompts import REPORT_FILE, check_claim, parts_there

# Seconds, memory and disk of each part of what is always the same work, as seen on two CPU cores.
Parts = dict[str, tuple[float, int, int]]
FETCHED: Parts = {
    "corpus": (5.0, 400_000_000, 3_000_000),
    "model": (30.0, 1_800_000_000, 560_000_000),
    "lens": (5.0, 400_000_000, 110_000_000),
}
QUICK: Parts = {
    "corpus": (5.0, 500_000_000, 3_000_000),
    "model": (75.0, 1_200_000_000, 12_000_000),
    "lens": (30.0, 1_000_000_000, 115_000_000),
}
FULL: Parts = {
    "corpus": (15.0, 800_000_000, 13_000_000),
    "model": (360.0, 1_500_000_000, 60_000_000),
    "lens": (150.0, 1_500_000_000, 460_000_000),
}
REPORT = (15.0, 0, 3_000_000)


def estimate_demo(out: Path, identity: dict[str, Any], parts: Parts) -> Cost:
    """Say what a demo would still do; nothing is built or fetched.

    Each part, corpus, model, lens and report, says by its figure ``there`` whether it is there and
    whole; the report is always written anew.

    Args:
        out: where it is built.
        identity: what its note says: see :func:`prismlm.demo.prompts.check_claim`.
        parts: FETCHED, QUICK or FULL.

    Raises:
        InputError: ``out`` holds something else, or another demo.
    """
    check_claim(out, identity)
    there = parts_there(out)
    costs = [
        Cost(*((0.0, 0, 0) if there[name] else amounts), {"there": there[name]}, name=name)
        for name, amounts in parts.items()
    ]
    seconds, memory, disk = REPORT
    written = (out / REPORT_FILE).is_file()
    costs.append(Cost(seconds, memory, 0 if written else disk, {"there": written}, name="report"))
    return Cost(
        sum(part.seconds or 0.0 for part in costs),
        max(part.memory_bytes for part in costs),
        sum(part.disk_bytes or 0 for part in costs),
        {"out": str(out)},
        tuple(costs),
        basis="As seen on two CPU cores"
        + ("; fetching the model (89 MB) comes on top." if parts is FETCHED else "."),
    )
