"""Write docs/results/prototype_mixer_four_models.md and .svg; ``--check`` only compares."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from benchmarks.prototype_mixer.four_models import KEPT, LENGTH, MODELS, RATES, ROWS, SHORT, STEPS
from benchmarks.prototype_mixer.table_sections import warmed_up
from benchmarks.shared.curves import Curve, draw
from benchmarks.shared.pages import measured_on, page_options, publish, read_results, table_head
from prismlm.files import read_json

NAMES = {"protot": "ProtoT", "llama": "LLaMA", "mamba2": "Mamba 2", "deltanet": "DeltaNet"}
COLOURS = {"protot": "#2563eb", "llama": "#6b7280", "mamba2": "#059669", "deltanet": "#d97706"}
# Of the source's large models: Table 1, perplexity at context 256 on FineWeb-Edu.
SOURCE = {"protot": 90.5, "llama": 78.7, "mamba2": 86.0, "deltanet": 90.4}
# Its training text (§4), which its models read ten times.
SOURCE_TOKENS, SOURCE_TIMES = 234.9e6, 10
Row = dict[str, Any]
Runs = dict[str, Row]


def main() -> int:
    """Render, or say whether page and plot are up to date."""
    given = page_options(__doc__).parse_args()
    folder = given.results / "prototype_mixer" / "four_models"
    rates = read_results(folder, "prototype_mixer.four_models", "*-*.json")
    folders = {STEPS: folder} | {
        int(part.name.removeprefix("steps_")): part for part in folder.glob("steps_*")
    }
    found = {steps: runs for steps, part in folders.items() if (runs := _runs(part))}
    tried = {
        int(part.name.removeprefix("rates_")): [read_json(p) for p in sorted(part.glob("*.json"))]
        for part in folder.glob("rates_*")
    }
    pages = {"prototype_mixer_four_models.md": render(rates, found, tried)}
    if found:
        pages["prototype_mixer_four_models.svg"] = plot(found)
    return publish({given.results / name: page for name, page in pages.items()}, check=given.check)


def _runs(folder: Path) -> Runs:
    return {name: read_json(p) for name in MODELS if (p := folder / f"{name}.json").is_file()}


def plot(found: dict[int, Runs]) -> str:
    """Return the curves of runs of one length after another."""
    panels = {
        f"tokens: runs of {steps:,} steps": [
            Curve(NAMES[name], COLOURS[name], [(p["tokens"], p["ce"]) for p in run["curve"]])
            for name, run in runs.items()
        ]
        for steps, runs in sorted(found.items())
    }
    return draw(panels, top=6.5)


def render(rates: list[Row], found: dict[int, Runs], tried: dict[int, list[Row]]) -> str:
    """Return the page.

    Args:
        rates: short runs of several rates.
        found: runs to their end, by model, of so many steps.
        tried: the same at other rates.
    """
    ended = [run for of_length in found.values() for run in of_length.values()]
    runs = [*rates, *ended]
    lines = [
        "# Four models of one size: which learns the most from as many tokens?",
        "",
        "Generated from `prototype_mixer/four_models/` by "
        "`python -m benchmarks.prototype_mixer.render_four_models`; the JSON by",
        "",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed corpus --texts DIR",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed rates",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed train",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed train --steps N",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed train --steps N "
        "--rates R",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed keep",
        "",
        "ProtoT, LLaMA, Mamba 2 and DeltaNet of 5.5 million parameters beside their embeddings, "
        "equal within 2 %, on text of 14 sets in mixed domains (questions and answers, medicine, "
        "science, stories, government, manuals, law and others), vocabulary 8,192. Every "
        f"model sees the same rows of {LENGTH} tokens in the same order, {ROWS} to a step, once. "
        f"One seed. Runs to their end: {warmed_up(ended)}. Embeddings and prototypes decay too.",
        "",
        *_rates(rates),
        *_lengths(found, rates),
        *_tried(tried, found),
        *_ended(tried, found),
        *_way(found.get(STEPS, {})),
        measured_on(max((run["environment"] for run in runs), key=lambda one: one["date"])),
    ]
    return "\n".join(lines) + "\n"


def _rates(short: list[Row]) -> list[str]:
    lines = [
        "## Rates",
        "",
        f"Perplexity after {SHORT} steps, {warmed_up(short)}, at rates each twice the one before; "
        "the best, in bold, is taken for the long run. What is best in a short run need not be in "
        "a long one.",
        "",
        *table_head("| | parameters | rate: perplexity |"),
    ]
    for name, rates in RATES.items():
        found = {run["rate"]: run for run in short if run["model"] == name}
        if not found:
            lines.append(f"| {NAMES[name]} | – | not run yet |")
            continue
        best = min(found, key=lambda rate: found[rate]["perplexity"])
        cells = [
            f"{rate:g}: {found[rate]['perplexity']:.1f}" if rate in found else f"{rate:g}: –"
            for rate in rates
        ]
        cells[rates.index(best)] = f"**{cells[rates.index(best)]}**"
        edge = "; at the edge" * (best in (rates[0], rates[-1]))
        size = f"{found[best]['parameters']:,}"
        lines.append(f"| {NAMES[name]} | {size} | {', '.join(cells)}{edge} |")
    return [*lines, ""]


def _lengths(found: dict[int, Runs], rates: list[Row]) -> list[str]:
    lines = ["## Perplexity by length of training", ""]
    missing = [NAMES[name] for name in NAMES if name not in found.get(STEPS, {})]
    if missing:
        lines += [f"Not trained for {STEPS:,} steps yet: {', '.join(missing)}.", ""]
    if not found:
        return lines
    tokens = {
        steps: next(iter(runs.values()))["tokens"] / 1e6 for steps, runs in sorted(found.items())
    }
    heads = [f"{steps:,} steps, {read:.1f} M tokens | × LLaMA's" for steps, read in tokens.items()]
    more = SOURCE_TOKENS * SOURCE_TIMES / 1e6 / max(tokens.values())
    lines += [
        "Of 200,000 tokens of held-out text, after runs whose rate falls to a tenth over their "
        f"length; each token is read once. The source's large models read {SOURCE_TOKENS / 1e6:.1f}"
        f" M tokens {SOURCE_TIMES} times over, {more:,.0f} times as many as the longest run here: "
        f"these are models at the beginning of their training. Those of {STEPS:,} steps are kept "
        f"in `{KEPT}/`, in bf16: robustness, themes, the judge and GLUE are studies of them.",
        "",
        *table_head(f"| | {' | '.join(heads)} | × LLaMA's in the source |"),
    ]
    for name in NAMES:
        cells = [_perplexity(name, runs) for _, runs in sorted(found.items())]
        theirs = SOURCE[name] / SOURCE["llama"]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} | {theirs:.2f} |")
    return [*lines, "", *_other_rates(found, rates)]


def _other_rates(found: dict[int, Runs], rates: list[Row]) -> list[str]:
    """Say which runs have another rate than the best above, found after they had been made."""
    best = {
        name: min((run for run in rates if run["model"] == name), key=lambda run: run["perplexity"])
        for name in {run["model"] for run in rates}
    }
    others = [
        f"{NAMES[name]} in {steps:,} steps {run['rate']:g}"
        for steps, runs in sorted(found.items())
        for name, run in runs.items()
        if name in best and run["rate"] != best[name]["rate"]
    ]
    return [f"Rates are the best above, but for: {', '.join(others)}.", ""] if others else []


def _tried(tried: dict[int, list[Row]], found: dict[int, Runs]) -> list[str]:
    """Return what other rates than the short runs' best gave at a length."""
    lines: list[str] = []
    for steps, others in sorted(tried.items()):
        runs = found.get(steps, {})
        llama = runs.get("llama")
        lines += [
            f"The same in {steps:,} steps at several rates, the short runs' best in bold; in "
            "brackets over LLaMA's:",
            "",
            *table_head("| | rate: perplexity |"),
        ]
        for name in NAMES:
            own = [run for run in others if run["model"] == name]
            every = _of_model(name, runs, others) if own else []
            cells: list[str] = []
            for run in sorted(every, key=lambda run: run["rate"]):
                over = f" ({run['perplexity'] / llama['perplexity']:.3f})" if llama else ""
                mark = "" if run in own else "**"
                cells.append(f"{mark}{run['rate']:g}: {run['perplexity']:.1f}{mark}{over}")
            lines += [f"| {NAMES[name]} | {', '.join(cells)} |"] if cells else []
        lines.append("")
    return lines


def _of_model(name: str, runs: Runs, others: list[Row]) -> list[Row]:
    own = [run for run in others if run["model"] == name]
    return [*own, runs[name]] if name in runs else own


def _ended(tried: dict[int, list[Row]], found: dict[int, Runs]) -> list[str]:
    """Say where ProtoT is behind LLaMA at the ends of runs, each at the best rate tried there."""
    rows: list[tuple[float, float]] = []
    for steps, runs in sorted(found.items()):
        others = tried.get(steps, [])
        both = [_of_model(name, runs, others) for name in ("protot", "llama")]
        if all(both):
            ours, theirs = (min(run["perplexity"] for run in own) for own in both)
            rows.append((both[0][0]["tokens"] / 1e6, ours / theirs))
    if len(rows) < 2:
        return []
    said = ", ".join(f"{ratio:.3f} after {tokens:.1f} M tokens" for tokens, ratio in rows)
    ahead = [tokens for tokens, ratio in rows if ratio < 1]
    behind = [tokens for tokens, ratio in rows if ratio > 1]
    where = "no crossing is seen"
    if ahead and behind and max(ahead) < min(behind):
        where = f"the two cross between {max(ahead):.1f} M and {min(behind):.1f} M"
    return [
        f"**At the ends of runs, each at the best rate tried at its length, {where}**: ProtoT's "
        f"perplexity over LLaMA's is {said}. More than one rate was tried in the table "
        "above alone. Where curves cross on the way of a long run, below, its rate is still high.",
        "",
    ]


def _perplexity(name: str, runs: Runs) -> str:
    if name not in runs:
        return "– | –"
    figure = runs[name]["perplexity"]
    over = f"{figure / runs['llama']['perplexity']:.3f}" if "llama" in runs else "–"
    return f"{figure:.1f} | {over}"


def _way(runs: Runs) -> list[str]:
    if not runs:
        return []
    return [
        "## Loss against tokens",
        "",
        "![held-out cross-entropy against tokens](prototype_mixer_four_models.svg)",
        "",
        f"On the way of {STEPS:,} steps, cross-entropy in nats per token on 20,000 held-out "
        "tokens; in brackets perplexity over LLaMA's. A curve that is flat while its rate is high, "
        f"and falls as the rate does, may have a lower best rate at this length than in {SHORT} "
        "steps.",
        "",
        *_curves(runs),
    ]


def _curves(long: Runs) -> list[str]:
    lines = table_head(f"| steps | tokens, M | {' | '.join(NAMES[name] for name in long)} |")
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
