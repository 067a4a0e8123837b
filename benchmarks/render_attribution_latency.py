"""Write docs/results/attribution_latency.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path("docs/results")
ROWS = (
    ("attribution", "attribution: shares by source, ten documents"),
    ("from_state", "with routing and splitting the logit before it"),
)


def main() -> int:
    """Render, or say whether the page is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = render(json.loads((RESULTS / "attribution_latency.json").read_text(encoding="utf-8")))
    page = RESULTS / "attribution_latency.md"
    if arguments.check:
        fresh = page.read_text(encoding="utf-8") == text
        print(f"{page} is {'up to date' if fresh else 'not what the JSON gives; render it again'}")
        return 0 if fresh else 1
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")
    return 0


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    lens, token, generation = result["lens"], result["token"], result["generation"]
    where = result["environment"]
    p99, ratio = token["attribution"]["p99_ms"], generation["ratio"]["attributed"]["median"]
    lines = [
        "# How long attribution takes",
        "",
        "Generated from `attribution_latency.json` by "
        "`python benchmarks/render_attribution_latency.py`;",
        "the JSON by",
        "",
        "    python benchmarks/attribution_latency.py prismlm-demo/model",
        "",
        f"torch {where['torch']}, {where['threads']} thread, {where['machine']}. The machine ran "
        f"other jobs: {where['load']:.1f} processes waited for its {where['cores']} cores on "
        "average.",
        "",
        "## One token from a warm lens",
        "",
        f"A synthetic lens of K = {lens['prototypes']:,} prototypes with L = {lens['contexts']} "
        f"contexts of width {lens['width']},",
        f"{lens['prototypes_per_token']} prototypes in use per token, all with positive evidence; "
        f"{lens['tokens_timed']:,} tokens, milliseconds. CPU time is",
        "what this process used, without its waiting for a core.",
        "",
        "| | p50 | p99 | p50, CPU time | p99, CPU time |",
        "|---|---|---|---|---|",
    ]
    for key, name in ROWS:
        wall, cpu = token[key], token[f"{key}_cpu"]
        lines.append(
            f"| {name} | {wall['p50_ms']:.2f} | {wall['p99_ms']:.2f} | {cpu['p50_ms']:.2f} | "
            f"{cpu['p99_ms']:.2f} |"
        )
    cpu = token["attribution_cpu"]["p99_ms"]
    lines += [
        "",
        f"Target: p99 of attribution at most 5 ms. By the clock **{_verdict(p99 <= 5)}**, "
        f"{p99:.2f} ms; of CPU time {cpu:.2f} ms.",
        "",
        "## Beside generation",
        "",
        f"{generation['tokens']} tokens from a {generation['model_type']} of "
        f"{generation['parameters'] / 1e6:.1f} million parameters with "
        f"{generation['prototypes']:,} prototypes,",
        f"{generation['prototypes_per_token']} per token, {generation['contexts']} contexts each: "
        f"median of {generation['samples']} rounds in which the ways take turns.",
        "",
        "| | ms | against generation alone: median, least, most |",
        "|---|---|---|",
        f"| generation alone | {generation['milliseconds']['plain']:.0f} | |",
    ]
    for key, name in (
        ("parts_alone", "and every logit split"),
        ("attributed", "and shares by source and ten documents over all of them"),
    ):
        r = generation["ratio"][key]
        lines.append(
            f"| {name} | {generation['milliseconds'][key]:.0f} | {r['median']:.3f}, "
            f"{r['least']:.3f}, {r['most']:.3f} |"
        )
    lines += ["", f"Target: at most 1.10. **{_verdict(ratio <= 1.1).capitalize()}**: {ratio:.3f}."]
    return "\n".join(lines) + "\n"


def _verdict(reached: bool) -> str:
    return "met" if reached else "missed"


if __name__ == "__main__":
    sys.exit(main())
