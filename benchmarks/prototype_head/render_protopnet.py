"""Write docs/results/protopnet.md and .svg from protopnet.json; ``--check`` only compares."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from benchmarks.shared.curves import Curve, draw
from benchmarks.shared.pages import page_options, publish, read_result, table_head

SHOWN = {
    "plain": "plain: W z",
    "prism": "prism: W z, prototypes beside",
    "through": "through: W ẑ",
    "dense": "dense: M α, all K",
    "dense-k": "dense-k: M α, k largest",
}
COLOURS = dict(zip(SHOWN, ("#6b7280", "#2563eb", "#059669", "#dc2626", "#d97706"), strict=True))
AXES = {"cpu_seconds": "CPU seconds in training steps", "tokens": "tokens"}
CLAIM = 3.0


def main() -> int:
    """Render, or say whether page and plot are up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "protopnet.json", "prototype_head.protopnet")
    pages = {"protopnet.md": render(result), "protopnet.svg": plot(result["runs"])}
    return publish({given.results / name: page for name, page in pages.items()}, check=given.check)


def plot(runs: list[dict[str, Any]]) -> str:
    """Return all seeds of a variant in one colour, by time and by tokens."""
    panels = {
        label: [
            Curve(
                SHOWN[run["variant"]],
                COLOURS[run["variant"]],
                [(point[axis], point["ce"]) for point in run["curve"]],
            )
            for run in sorted(runs, key=lambda run: list(SHOWN).index(run["variant"]))
        ]
        for axis, label in AXES.items()
    }
    return draw(panels, top=5.5)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    settings = result["settings"]
    lines = [
        "# The ProtoPNet-style head against PRISM's",
        "",
        "Generated from `protopnet.json` by "
        "`python -m benchmarks.prototype_head.render_protopnet`; the JSON by",
        "",
        "    prismlm corpus build tinystories.parquet --out tinystories --vocab-size "
        f"{result['corpus']['vocabulary']}",
        # The script may have moved since it measured; its options are what was measured.
        "    OMP_NUM_THREADS=1 python -m benchmarks.prototype_head.protopnet --"
        + result["command"].partition(" --")[2],
        "",
        "The claim (PRISM, “Architecture”): *“On toy experiments with the TinyStories dataset, the "
        "ProtoPNet style head required up to 3× longer wallclock time to reach the same "
        "perplexity.”*",
        "",
        *_verdict(result),
        *_setting(result),
        *_cost(result["runs"], settings["prototypes"], result["corpus"]["vocabulary"]),
        *_levels(result),
        *_rates(result["search"]),
    ]
    return "\n".join(lines[:-1]) + "\n"


def _verdict(result: dict[str, Any]) -> list[str]:
    """Say whether the claim holds, from the figures alone."""
    lines, tops = ["## Does it hold here?", ""], dict[str, float]()
    everywhere = " in every seed" if len({run["seed"] for run in result["runs"]}) > 1 else ""
    for variant, reference in (
        ("dense", "prism"),
        ("dense", "through"),
        ("dense-k", "prism"),
        ("dense-k", "through"),
    ):
        found = [
            (row, row["ratio"][reference][variant])
            for row in result["comparison"]["levels"]
            if row["ratio"][reference][variant]["cpu_seconds"]
        ]
        row, largest = max(found, key=lambda item: item[1]["cpu_seconds"]["mean"])
        tops[reference] = max(tops.get(reference, 0.0), largest["cpu_seconds"]["mean"])
        slower = sum(ratio["cpu_seconds"]["low"] > 1 for _, ratio in found)
        count = f"{slower} of {len(found)}" if slower < len(found) else f"all {len(found)}"
        hardest = found[-1][1]
        lines.append(
            f"- **{variant} against {reference}**: longer{everywhere} at {count} levels. At "
            f"most {_parts(largest)}, at perplexity {_level_name(row, result)}; at the hardest "
            f"level {_parts(hardest)}."
        )
    lines[2:2] = [
        f"- Against *through*, the like-for-like: {_size(tops['through'])}.",
        "- Against *prism*, whose prediction does not pass through its prototypes: "
        f"{_size(tops['prism'])}.",
        "",
        "Each ratio is the cost of a token times the tokens needed, in CPU time:",
        "",
    ]
    return [*lines, "", "![held-out cross-entropy against CPU time](protopnet.svg)", ""]


def _size(top: float) -> str:
    """Say how a largest ratio stands to the claim; it is given there as one digit."""
    if top <= 1:
        return "**it does not hold**, no ProtoPNet-style head is slower at any level"
    if top >= CLAIM:
        return f"**it holds**, up to {top:.1f}× where {CLAIM:g}× is claimed"
    size = "close to that size, not to all of it" if top >= 0.9 * CLAIM else "not to that size"
    return f"**{size}**, at most {top:.1f}× where {CLAIM:g}× is claimed"


def _parts(ratio: dict[str, dict[str, float]]) -> str:
    cpu, tokens = (ratio[axis]["mean"] for axis in ("cpu_seconds", "tokens"))
    return f"{cpu:.2f}× the CPU time = {cpu / tokens:.2f}× a token · {tokens:.2f}× the tokens"


def _setting(result: dict[str, Any]) -> list[str]:
    where, settings, corpus = result["environment"], result["settings"], result["corpus"]
    seeds = sorted({run["seed"] for run in result["runs"]})
    tokens = fmean(run["curve"][-1]["tokens"] for run in result["runs"])
    return [
        "## Setting",
        "",
        "- *plain* W z; *prism* W z with R1, R2 and RES beside it, reaching the decoder as in the "
        "source (weights 0.1, prototypes placed on hidden states at "
        f"{settings['place_at']:.0%} of the steps; its prediction does not pass through "
        "prototypes); *through* W ẑ, the like-for-like reparameterisation M = W P; *dense* M "
        "ReLU(τ c) over all K; *dense-k* the same over the k largest. *through* and *dense-k* "
        "are the same function at the first step (M starts as W P).",
        f"- `{settings['preset']}`, V = {corpus['vocabulary']:,}, K = {settings['prototypes']:,}, "
        f"k = {settings['prototypes_per_token']}; {settings['steps']} steps of "
        f"{settings['rows']} × {settings['length']} positions, {tokens:,.0f} tokens a run of "
        f"{corpus['tokens'] - corpus['heldout']['tokens']:,} to train on; seeds "
        f"{', '.join(map(str, seeds))}. All variants of a seed have the same backbone "
        "weights at the start, the same rows in the same order, AdamW at peak rate "
        f"{settings['learning_rate']:g} (head: below) with a warm-up and a cosine; "
        f"{'bf16 autocast' if settings['bf16'] else 'float32'}. dense and dense-k have no "
        "clustering losses: cross-entropy alone, as through.",
        f"- Held-out CE over {result['heldout_predictions']:,} predictions every "
        f"{settings['round']} steps; evaluations are not in the times. All variants run in one "
        f"process, {settings['round']} steps each in turn, on one thread of a machine that other "
        "work shares: CPU time is the main figure, wall-clock stands beside it.",
        f"- Measured {where['date']} at {where['commit']} on {where['machine']} (of "
        f"{where['cores']}, load {where['load_average']:.1f}); Python {where['python']}, torch "
        f"{where['torch']}, transformers {where['transformers']}.",
        "",
    ]


def _cost(runs: list[dict[str, Any]], prototypes: int, vocabulary: int) -> list[str]:
    # P and τ are all that the head of through adds.
    added = next(run["head_parameters"] for run in runs if run["variant"] == "through")
    width = (added - 1) // prototypes
    lines = [
        "## What a step costs, and where the runs end",
        "",
        "Means over seeds. × is against *through*.",
        "",
        "| | head parameters | CPU ms a step | × | wall ms a step | × | final CE | perplexity |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = {key: _mean(runs, "through", key) for key in ("cpu_ms_per_step", "wall_ms_per_step")}
    for variant, shown in SHOWN.items():
        own = [run for run in runs if run["variant"] == variant]
        cpu = _mean(runs, variant, "cpu_ms_per_step")
        wall = _mean(runs, variant, "wall_ms_per_step")
        finals = [run["curve"][-1]["ce"] for run in own]
        each = ", ".join(f"{ce:.3f}" for ce in finals)
        lines.append(
            f"| {shown} | {own[0]['head_parameters']:,} | {cpu:.0f} | "
            f"{cpu / base['cpu_ms_per_step']:.2f} | {wall:.0f} | "
            f"{wall / base['wall_ms_per_step']:.2f} | {fmean(finals):.3f} ({each}) | "
            f"{fmean(math.exp(ce) for ce in finals):.1f} |"
        )
    only = [
        run["curve"][-1]["prototype_only_ce"]
        for run in runs
        if run["variant"] == "prism" and "prototype_only_ce" in run["curve"][-1]
    ]
    return [
        *lines,
        "",
        f"From ẑ alone, *prism* ends at a CE of {fmean(only):.3f}: what it predicts with its "
        "prototypes, where *through* and the dense heads predict with nothing else.",
        "",
        f"M is K·V = {prototypes * vocabulary:,} weights, K/d = {prototypes / width:.1f} times W "
        f"(d = {width}), and the product with all K costs as many times more; in the source's "
        "example (K = 2,000, d ≈ 500) it is 4 times. How much of a step that is depends on the "
        "decoder, here a small one. With the k largest only k rows of Mᵀ are read, k/d of the "
        "work of W, but AdamW still visits all of M.",
        "",
    ]


def _mean(runs: list[dict[str, Any]], variant: str, key: str) -> float:
    return fmean(run[key] for run in runs if run["variant"] == variant)


def _level_name(row: dict[str, Any], result: dict[str, Any]) -> str:
    if row["perplexity"] != "slowest":
        return row["perplexity"]
    ends = result["comparison"]["slowest_perplexity"]
    return f"{fmean(ends.values()):.1f}, where the slowest ends"


def _levels(result: dict[str, Any]) -> list[str]:
    comparison = result["comparison"]
    slowest = ", ".join(sorted(set(comparison["slowest"].values())))
    lines = [
        "## To the same perplexity",
        "",
        "How much longer than the reference until held-out perplexity first falls to the level: "
        "CPU time (range over seeds) · wall-clock · tokens, geometric means; below 1 is sooner, "
        "and – is never in some seed. Points between "
        f"evaluations are interpolated. The last level is where the slowest variant ({slowest}) "
        "ends in each seed.",
        "",
    ]
    for reference in ("prism", "through"):
        lines += [
            f"Against *{reference}*:",
            "",
            *table_head(f"| perplexity | {' | '.join(v for v in SHOWN if v != reference)} |"),
        ]
        for row in comparison["levels"]:
            cells = [
                _cell(row["ratio"][reference][variant]) for variant in SHOWN if variant != reference
            ]
            lines.append(f"| {_level_name(row, result)} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def _cell(ratios: dict[str, dict[str, float] | None]) -> str:
    cpu, wall, tokens = (ratios[axis] for axis in ("cpu_seconds", "wall_seconds", "tokens"))
    if cpu is None or wall is None or tokens is None:
        return "–"
    return (
        f"{cpu['mean']:.2f} ({cpu['low']:.2f}–{cpu['high']:.2f}) · {wall['mean']:.2f} · "
        f"{tokens['mean']:.2f}"
    )


def _rates(search: dict[str, Any]) -> list[str]:
    rates = sorted({rate for ces in search["ce"].values() for rate in ces}, key=float)
    lines = [
        "## Peak rates",
        "",
        f"Held-out CE after a short run of {search['steps']} steps (seed {search['seed']}, not "
        "among those above), with its own warm-up and cosine; the best, in bold, is used above. "
        "*plain* chose the backbone's rate, for all variants; the others then the rate of their "
        "prototypes, τ and M.",
        "",
        *table_head(f"| | {' | '.join(rates)} |"),
    ]
    for variant, ces in search["ce"].items():
        best = min(ces.values())
        shown = {r: f"**{ce:.3f}**" if ce == best else f"{ce:.3f}" for r, ce in ces.items()}
        lines.append(f"| {variant} | " + " | ".join(shown.get(r, "") for r in rates) + " |")
    lines.append("")
    edge: list[str] = []
    for variant, ces in search["ce"].items():
        tried = sorted(ces, key=float)
        chosen = min(ces, key=lambda rate: ces[rate])
        if chosen in (tried[0], tried[-1]):
            edge.append(f"{variant} {'below' if chosen == tried[0] else 'above'} {chosen}")
    if edge:
        lines += [f"At the edge of what was tried; the best may lie, for {', '.join(edge)}.", ""]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
