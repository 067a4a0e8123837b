"""Write docs/results/prototype_mixer.md from its folder; ``--check`` only compares the two."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from pages import RESULTS, measured_on, publish

NAMES = {"llama": "LLaMA", "mamba": "Mamba 2", "deltanet": "DeltaNet", "protot": "ProtoT"}
# Table 1 of the source: perplexity at 256, 512, 1,024 and 2,048.
SOURCE = {
    "llama": (78.7, 70.4, 65.3, 63.6),
    "mamba": (86.0, 78.0, 70.5, 69.5),
    "deltanet": (90.4, 76.3, 70.6, 68.9),
    "protot": (90.5, 84.8, 80.5, 81.9),
}
SOURCE_CONTEXTS = (256, 512, 1024, 2048)
Row = dict[str, Any]
Key = tuple[str, str, int, float]


def main() -> int:
    """Render, or say whether the page is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    files = sorted((given.results / "prototype_mixer").glob("*.json"))
    if not files:
        print(f"{given.results / 'prototype_mixer'} holds no run: nothing to render")
        return 0
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return publish({given.results / "prototype_mixer.md": render(rows)}, check=given.check)


def render(rows: list[Row]) -> str:
    """Return the page."""
    runs: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["model"], row["variant"], row["context"], row["factor"]].append(row)
    contexts = sorted({context for _, _, context, _ in runs})
    steps = _several({row["settings"]["steps"] for row in rows})
    vocabularies = _several({row["settings"]["corpus"] for row in rows})
    seeds = _several({row["seed"] for row in rows})
    lines = [
        "# The prototype mixer beside attention, Mamba and the delta rule",
        "",
        "Generated from the files of `prototype_mixer/` by "
        "`python benchmarks/render_prototype_mixer.py`;",
        "`benchmarks/prototype_mixer.py` writes those and says how.",
        "",
        f"Perplexity on held-out text, {steps} steps, corpus `{vocabularies}`, seeds {seeds}: mean "
        "over seeds, least and most in brackets. Every model sees the same rows in the same order. "
        "One size, one corpus: what holds here need not hold at the source's.",
        "",
        *_compared(runs, contexts),
        *_improved(runs, contexts),
        *_rates(runs, contexts),
        measured_on(max(rows, key=lambda row: row["environment"]["date"])["environment"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _several(values: set[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


def _compared(runs: dict[Key, list[Row]], contexts: list[int]) -> list[str]:
    models = [name for name in NAMES if any(key[0] == name for key in runs)]
    lines = ["## By context", "", _header("model", contexts, "parameters"), _rule(contexts, 1)]
    for name in models:
        found = [runs.get((name, "", context, 1.0)) for context in contexts]
        size = next((rows[0]["parameters"] for rows in found if rows), None)
        cells = [_cell(rows) for rows in found]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} | {_number(size)} |")
    lines += [
        "",
        "Against LLaMA at the same context and seed, median and range of the ratio; in brackets "
        "the source's (Table 1, another size and corpus).",
        "",
        _header("model", contexts),
        _rule(contexts),
    ]
    for name in models:
        if name == "llama":
            continue
        cells = [
            _ratio(runs.get((name, "", c, 1.0)), runs.get(("llama", "", c, 1.0))) + _source(name, c)
            for c in contexts
        ]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    lines += [
        "",
        "Training, seconds by the clock (processor seconds), evaluation among them, median; runs "
        "did not take turns, so these are no comparison of speed. A run that was resumed is not "
        "counted.",
        "",
        _header("model", contexts),
        _rule(contexts),
    ]
    for name in models:
        cells = [_time(runs.get((name, "", context, 1.0))) for context in contexts]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    return [*lines, ""]


def _improved(runs: dict[Key, list[Row]], contexts: list[int]) -> list[str]:
    variants = list(dict.fromkeys(variant for _, variant, _, _ in runs if variant))
    if not variants:
        return []
    lines = [
        "## ProtoT, varied",
        "",
        "Perplexity, and in brackets its ratio to the default's with the same seeds: median and "
        "range. Below 1 is better.",
        "",
        _header("what", contexts, "parameters"),
        _rule(contexts, 1),
    ]
    for variant in ["", *variants]:
        found = [runs.get(("protot", variant, context, 1.0)) for context in contexts]
        size = next((rows[0]["parameters"] for rows in found if rows), None)
        cells = [
            _mean(rows)
            + (f" ({_ratio(rows, runs.get(('protot', '', c, 1.0)))})" if rows and variant else "")
            for rows, c in zip(found, contexts, strict=True)
        ]
        lines.append(f"| {variant or 'default'} | {' | '.join(cells)} | {_number(size)} |")
    return [*lines, ""]


def _rates(runs: dict[Key, list[Row]], contexts: list[int]) -> list[str]:
    factors = sorted({factor for _, _, _, factor in runs})
    if factors == [1.0]:
        return []
    lines = [
        "## Other learning rates",
        "",
        _header("model, × its rate", contexts),
        _rule(contexts),
    ]
    for name in NAMES:
        for factor in factors:
            found = [runs.get((name, "", context, factor)) for context in contexts]
            if any(found):
                cells = " | ".join(_cell(rows) for rows in found)
                lines.append(f"| {NAMES[name]}, {factor:g} | {cells} |")
    return [*lines, ""]


def _header(first: str, contexts: list[int], *more: str) -> str:
    return "| " + " | ".join([first, *(f"{context:,}" for context in contexts), *more]) + " |"


def _rule(contexts: list[int], more: int = 0) -> str:
    return "|" + "---|" * (1 + len(contexts) + more)


def _mean(rows: list[Row] | None) -> str:
    return f"{statistics.mean(row['perplexity'] for row in rows):.2f}" if rows else "–"


def _cell(rows: list[Row] | None) -> str:
    if not rows:
        return "–"
    values = [row["perplexity"] for row in rows]
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else " (one seed)"
    return _mean(rows) + spread


def _ratio(rows: list[Row] | None, others: list[Row] | None) -> str:
    """Return the ratios of perplexities of equal seeds."""
    of_seed = {row["seed"]: row["perplexity"] for row in others or []}
    found = [
        row["perplexity"] / of_seed[row["seed"]] for row in rows or [] if row["seed"] in of_seed
    ]
    if not found:
        return "–"
    spread = f", {min(found):.3f} to {max(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.median(found):.3f}{spread}"


def _source(name: str, context: int) -> str:
    if context not in SOURCE_CONTEXTS:
        return ""
    at = SOURCE_CONTEXTS.index(context)
    return f" ({SOURCE[name][at] / SOURCE['llama'][at]:.3f})"


def _time(rows: list[Row] | None) -> str:
    whole = [row for row in rows or [] if not row["resumed"]]
    if not whole:
        return "–"
    elapsed, processor = (
        statistics.median(row[key] for row in whole) for key in ("seconds", "processor_seconds")
    )
    return f"{elapsed:.0f} ({processor:.0f})"


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


if __name__ == "__main__":
    sys.exit(main())
