"""Write docs/results/prototype_mixer_four_models.md and .svg; ``--check`` only compares."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from benchmarks.prototype_mixer.four_models import KEPT, LENGTH, MODELS, RATES, ROWS, SHORT
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


def main() -> int:
    """Render, or say whether page and plot are up to date."""
    given = page_options(__doc__).parse_args()
    folder = given.results / "prototype_mixer" / "four_models"
    short = read_results(folder, "prototype_mixer.four_models", "*-*.json")
    ended, stopped = (_long_runs(part) for part in (folder, folder / "so_far"))
    slower = [read_json(path) for path in sorted(folder.glob("slower_*.json"))]
    pages = {"prototype_mixer_four_models.md": render(short, ended, stopped, slower)}
    if ended or stopped:
        pages["prototype_mixer_four_models.svg"] = plot(ended, stopped)
    return publish({given.results / name: page for name, page in pages.items()}, check=given.check)


def _long_runs(folder: Path) -> dict[str, Row]:
    return {name: read_json(p) for name in MODELS if (p := folder / f"{name}.json").is_file()}


def plot(ended: dict[str, Row], stopped: dict[str, Row]) -> str:
    """Return the curves of the long runs, those that were stopped in a panel of their own."""
    panels: dict[str, list[Curve]] = {}
    for runs, said in ((ended, "runs of {:,} steps"), (stopped, "runs of {:,} steps, so far")):
        if runs:
            steps = next(iter(runs.values()))["steps"]
            panels[f"tokens: {said.format(steps)}"] = [
                Curve(NAMES[name], COLOURS[name], [(p["tokens"], p["ce"]) for p in run["curve"]])
                for name, run in runs.items()
            ]
    return draw(panels, top=6.5)


def render(
    short: list[Row], ended: dict[str, Row], stopped: dict[str, Row], slower: list[Row]
) -> str:
    """Return the page.

    Args:
        short: runs of several rates.
        ended: whole runs, by model.
        stopped: longer runs, whole ones or as far as they have come, by model.
        slower: whole runs with a longer warm-up.
    """
    lines = [
        "# Four models of one size: which learns the most from as many tokens?",
        "",
        "Generated from `prototype_mixer/four_models/` by "
        "`python -m benchmarks.prototype_mixer.render_four_models`; the JSON by",
        "",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed corpus --texts DIR",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed rates",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed train --steps 1500",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed rates --out longer",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed train --out longer "
        "--work longer-runs",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed curves --out longer "
        "--work longer-runs --into docs/results/prototype_mixer/four_models/so_far",
        "    python -m benchmarks.prototype_mixer.four_models corpus-mixed keep",
        "",
        "ProtoT, LLaMA, Mamba 2 and DeltaNet of 5.5 million parameters beside their embeddings, "
        "equal within 2 %, on text of 14 sets in mixed domains (questions and answers, medicine, "
        "science, stories, government, manuals, law and others), vocabulary 8,192. Every "
        f"model sees the same rows of {LENGTH} tokens in the same order, {ROWS} to a step, once. "
        "One seed.",
        "",
        *_rates(short),
        *_ended(ended),
        *(_slower(run, ended) for run in slower),
        *_stopped(stopped),
        measured_on(
            max((r["environment"] for r in [*short, *ended.values(), *stopped.values()]), key=_date)
        ),
    ]
    return "\n".join(lines) + "\n"


def _date(environment: Row) -> str:
    return environment["date"]


def _rates(short: list[Row]) -> list[str]:
    lines = [
        "## Rates",
        "",
        f"Perplexity after {SHORT} steps at rates each twice the one before; the best, in bold, is "
        "taken for the long run. What is best in a short run need not be in a long one.",
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


def _ended(runs: dict[str, Row]) -> list[str]:
    lines = ["## Loss against tokens", ""]
    missing = [NAMES[name] for name in NAMES if name not in runs]
    if missing:
        lines += [f"Not trained yet: {', '.join(missing)}.", ""]
    if not runs:
        return lines
    first = next(iter(runs.values()))
    lines += [
        "![held-out cross-entropy against tokens](prototype_mixer_four_models.svg)",
        "",
        f"{first['steps']:,} steps, {first['tokens'] / 1e6:.1f} M tokens, each once, at rates that "
        "fall to a tenth. The source's large models read "
        f"{SOURCE_TOKENS / 1e6:.1f} M tokens {SOURCE_TIMES} times over, "
        f"{SOURCE_TOKENS * SOURCE_TIMES / first['tokens']:,.0f} times as many: these are models at "
        "the beginning of their training, and the ones that the other studies are made on, as "
        f"`{KEPT}/` has them, in bf16.",
        "",
        *table_head("| | perplexity | × LLaMA's | × LLaMA's in the source |"),
    ]
    for name, run in runs.items():
        theirs = SOURCE[name] / SOURCE["llama"]
        ratio = f"{run['perplexity'] / runs['llama']['perplexity']:.3f}" if "llama" in runs else "–"
        lines.append(f"| {NAMES[name]} | {run['perplexity']:.1f} | {ratio} | {theirs:.2f} |")
    return [
        *lines,
        "",
        "Of 200,000 tokens of held-out text. On the way, cross-entropy in nats per token on 20,000 "
        "of them; in brackets perplexity over LLaMA's.",
        "",
        *_curves(runs),
    ]


def _slower(run: Row, ended: dict[str, Row]) -> str:
    name, own = NAMES[run["model"]], ended[run["model"]]["settings"]["optimizer"]["warmup"]
    share = run["settings"]["optimizer"]["warmup"]
    others = [
        f"{NAMES[other]} {one['perplexity'] / run['perplexity']:.3f}"
        for other, one in ended.items()
        if other != run["model"]
    ]
    return (
        f"All are warmed up over {own:.0%} of their steps, as the source's. {name} warmed up over "
        f"{share:.0%} ends at {run['perplexity']:.1f}; of that the others have "
        f"{', '.join(others)}.\n"
    )


def _stopped(runs: dict[str, Row]) -> list[str]:
    if not runs:
        return []
    steps = next(iter(runs.values()))["steps"]
    found = {name: run["perplexity"] for name, run in runs.items() if "perplexity" in run}
    at = [
        f"{NAMES[name]} {run['curve'][-1]['step']:,}"
        for name, run in runs.items()
        if name not in found
    ]
    ended = [
        f"{NAMES[name]} {figure:.1f}{_beside(name, figure, found.get('llama'))}"
        for name, figure in found.items()
    ]
    said = [
        f"Runs whose rate falls over {steps:,} steps, 20 million tokens. It is the best of {SHORT} "
        "steps: a curve that is flat while its rate is high, and falls as the rate does, may have "
        "a lower best one at this length."
    ]
    if ended:
        said.append(f"Ended, perplexity of 200,000 held-out tokens: {', '.join(ended)}.")
    if at:
        said.append(f"Stopped so far, at step: {', '.join(at)}.")
    return [f"## Towards {steps:,} steps", "", " ".join(said), "", *_curves(runs)]


def _beside(name: str, figure: float, llama: float | None) -> str:
    return "" if llama is None or name == "llama" else f" ({figure / llama:.3f} × LLaMA's)"


def _curves(long: dict[str, Row]) -> list[str]:
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
