"""How long attribution takes beside generation.

    python -m benchmarks.attribution.latency MODEL --called NAME

MODEL is a model directory with a lens. Other models keep what an earlier run found.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.turns import in_turns
from prismlm.files import read_json, write_json

GENERATED, SAMPLES = 50, 60
PROMPT = "Once upon a time there was a little girl who lived"


def time_generation(lm: prismlm.PrismLM) -> dict[str, Any]:
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
    times = in_turns(arms, SAMPLES, "cpu").elapsed
    ratios = {
        name: [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        for name in arms
        if name != "plain"
    }
    return {
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "prototypes": lm.head.num_prototypes,
        "prototypes_per_token": lm.head.prototypes_per_token,
        "tokens": GENERATED,
        "positions": len(lm.lens.cells) if lm.lens and lm.lens.cells else 0,
        "samples": SAMPLES,
        "milliseconds": {k: 1000 * statistics.median(v) for k, v in times.items()},
        "ratio": {
            k: {"median": statistics.median(v), "least": min(v), "most": max(v)}
            for k, v in ratios.items()
        },
    }


def main() -> None:
    """Measure and write the result."""
    parser = script_options(__doc__, RESULTS / "attribution_latency.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("--called", default="the demo's kind of model", help="on the page")
    args = parser.parse_args()
    row = time_generation(prismlm.load(args.model))
    row |= {"model": args.called, "environment": environment()}
    result = read_json(args.out) if args.out.is_file() else {}
    others = [one for one in result.get("generation", []) if one["model"] != row["model"]]
    result["generation"] = sorted([*others, row], key=lambda one: one["parameters"])
    write_json(args.out, result)
    print(row)


if __name__ == "__main__":
    main()
