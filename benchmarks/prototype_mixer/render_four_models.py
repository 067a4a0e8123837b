"""Write docs/results/prototype_mixer_four_models.md and .svg; ``--check`` only compares."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from benchmarks.prototype_mixer.four_models import LENGTH, MODELS, RATES, ROWS, SHORT, STEPS
from benchmarks.shared.curves import Curve, draw
from benchmarks.shared.pages import measured_on, page_options, publish, read_results, table_head
from prismlm.files import read_json

NAMES = {"protot": "ProtoT", "llama": "LLaMA", "mamba2": "Mamba 2", "deltanet": "DeltaNet"}
COLOURS = {"protot": "#2563eb", "llama": "#6b7280", "mamba2": "#059669", "deltanet": "#d97706"}
# Of the source's large models: Table 1, perplexity at context 256 on FineWeb-Edu.
SOURCE = {"protot": 90.5, "llama": 78.7, "mamba2": 86.0, "deltanet": 90.4}
Row = dict[str, Any]


def main() -> int:
    """Render, or say whether page and plot are up to date."""
    given = page_options(__doc__).parse_args()
    folder = given.results / "prototype_mixer" / "four_models"
    short = read_results(folder, "prototype_mixer.four_models", "*-*.json")
    long = {name: run for name in MODELS if (run := _long_run(folder, name)) is not None}
    pages = {"prototype_mixer_four_models.md": render(short, long)}
    if long:
        pages["prototype_mixer_four_models.svg"] = plot(long)
    return publish({given.results / name: page for name, page in pages.items()}, check=given.check)


def _long_run(folder: Path, name: str) -> Row | None:
    places = (folder / f"{name}.json", folder / "so_far" / f"{name}.json")
    return next((read_json(path) for path in places if path.is_file()), None)


def plot(long: dict[str, Row]) -> str:
    """Return the curves of the long runs."""
    curves = [
        Curve(NAMES[name], COLOURS[name], [(p["tokens"], p["ce"]) for p in run["curve"]])
        for name, run in long.items()
    ]
    return draw({"tokens": curves}, top=6.0)


def render(short: list[Row], long: dict[str, Row]) -> str:
    """Return the page."""
    lines = [
        "# Four models of one size: which learns the most from as many tokens?",
        "",
        "Generated from `prototype_mixer/four_models/` by "
        "`python -m benchmarks.prototype_mixer.render_four_models`; the JSON by",
        "",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed corpus --texts DIR",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed rates",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed train",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed curves",
        "",
        "ProtoT, LLaMA, Mamba 2 and DeltaNet of 5.5 million parameters beside their embeddings, "
        "equal within 2 %, on text of 14 sets in mixed domains (questions and answers, medicine, "
        "science, stories, government, manuals, law and others), vocabulary 8,192. Every "
        f"model sees the same rows of {LENGTH} tokens in the same order, {ROWS} to a step, once. "
        "One seed.",
        "",
        *_rates(short),
        *_curves(long),
        measured_on(max((r["environment"] for r in [*short, *long.values()]), key=_date)),
    ]
    return "\n".join(lines) + "\n"


def _date(environment: Row) -> str:
    return environment["date"]


def _rates(short: list[Row]) -> list[str]:
    lines = [
        "## Rates",
        "",
        f"Perplexity after {SHORT} steps at three rates of each, the middle one twice the first "
        "and half the last; the best is taken for the long run. A best at the edge of its three "
        "is marked: a rate beyond it might be better still, and what is best in a short run need "
        "not be in a long one.",
        "",
        *table_head("| | parameters | lowest rate | middle | highest | taken |"),
    ]
    for name, rates in RATES.items():
        found = {run["rate"]: run for run in short if run["model"] == name}
        cells = [f"{found[rate]['perplexity']:.1f}" if rate in found else "–" for rate in rates]
        taken, size = "not run yet", "–"
        if found:
            best = min(found, key=lambda rate: found[rate]["perplexity"])
            edge = ", **at the edge**" if best != rates[1] else ""
            taken = f"{best:g}{edge}" if len(found) == len(rates) else "not run yet"
            size = f"{found[best]['parameters']:,}"
        lines.append(f"| {NAMES[name]} | {size} | {' | '.join(cells)} | {taken} |")
    return [*lines, ""]


def _curves(long: dict[str, Row]) -> list[str]:
    lines = ["## Loss against tokens", ""]
    missing = [NAMES[name] for name in NAMES if name not in long]
    if missing:
        lines += [f"Not trained yet: {', '.join(missing)}.", ""]
    if not long:
        return lines
    source = [f"{NAMES[name]} {p / SOURCE['llama']:.2f}" for name, p in SOURCE.items()]
    ended = [f"{NAMES[name]} {run['curve'][-1]['step']:,}" for name, run in long.items()]
    lines += [
        "![held-out cross-entropy against tokens](prototype_mixer_four_models.svg)",
        "",
        f"Steps so far, of {STEPS:,}: {', '.join(ended)}. Cross-entropy in nats per token of "
        "held-out text, the same 20,000 tokens for all, while the rate still falls; in brackets "
        "perplexity over LLaMA's. The source's large models end at "
        f"{', '.join(source)}.",
        "",
        *table_head(f"| steps | tokens, M | {' | '.join(NAMES[name] for name in long)} |"),
    ]
    at = {name: {point["step"]: point for point in run["curve"]} for name, run in long.items()}
    for step in sorted({step for points in at.values() for step in points}):
        tokens = next(points[step]["tokens"] for points in at.values() if step in points)
        base = at.get("llama", {}).get(step)
        cells = [_cell(points.get(step), base) for points in at.values()]
        lines.append(f"| {step:,} | {tokens / 1e6:.2f} | {' | '.join(cells)} |")
    lines.append("")
    if {"protot", "llama"} <= at.keys():
        lines += [_crossing_words(at["protot"], at["llama"]), ""]
    return lines


def _cell(point: Row | None, base: Row | None) -> str:
    if point is None:
        return "–"
    ratio = "" if base in (None, point) else f" ({math.exp(point['ce'] - base['ce']):.3f})"
    return f"{point['ce']:.3f}{ratio}"


def _crossing_words(protot: dict[int, Row], llama: dict[int, Row]) -> str:
    found = crossings(protot, llama)
    steps = sorted(protot.keys() & llama.keys())
    last = math.exp(protot[steps[-1]]["ce"] - llama[steps[-1]]["ce"])
    said = f"after {llama[steps[-1]]['tokens'] / 1e6:.1f} M tokens its perplexity is {last:.3f} ×"
    if not found:
        return f"**ProtoT's curve and LLaMA's do not cross**: {said} LLaMA's."
    where = " and ".join(f"{tokens / 1e6:.1f} M" for tokens in found)
    return (
        f"**ProtoT's curve crosses LLaMA's at {where} tokens** (between two evaluations, on a "
        f"logarithmic scale of tokens); {said} LLaMA's."
    )


def crossings(one: dict[int, Row], other: dict[int, Row]) -> list[float]:
    """Return at how many tokens two curves cross: ln(tokens) is interpolated between steps."""
    steps = sorted(one.keys() & other.keys())
    rows = [(math.log(one[s]["tokens"]), one[s]["ce"] - other[s]["ce"]) for s in steps]
    return [
        math.exp(x + (y - x) * a / (a - b))
        for (x, a), (y, b) in itertools.pairwise(rows)
        if a * b < 0
    ]


if __name__ == "__main__":
    raise SystemExit(main())
