"""Write docs/results/prototype_head.md and its plot from their JSON; ``--check`` only compares."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from benchmarks.first_light.render import domains
from benchmarks.prototype_head.frontier_plot import Point, draw
from benchmarks.shared.pages import RESULTS, publish

# Two-sided 95 % points of Student's t by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
WITHIN, EXPLAINED, IN_USE, STEP = 2.5, 0.97, 0.97, 1.10
WHAT = {
    "default": "**default**: detached, placed half way, KL",
    "default-all": "trained on every position, not a third",
    "default-quarter": "on a quarter",
    "default-eighth": "on an eighth",
    "default-early": "on a quarter, placed at step 200",
    "default-sampled": "on a quarter, placed on random states",
    "default-revived": "on a quarter, unused prototypes revived",
    "default-annealed": "on a quarter, k from 64 to 16",
    "default-ce": "on a quarter, labels instead of the model's prediction",
    "detached": "the source's losses × 0.1, detached",
    "light": "the source's losses × 0.1, into the model",
    "light-kl": "the same with the KL",
    "constant": "the source's losses × 0.1, constant",
    "warmed-up": "the source's losses, placed, rising to 1",
    "source": "the source's losses from step 0, random prototypes",
    "source-literal": "the same, read literally",
}


@dataclass(frozen=True)
class Figure:
    """A mean over seeds with half the width of its 95 % interval; no interval for one seed."""

    mean: float
    half: float | None

    def show(self, digits: int, unit: str = "") -> str:
        """Return it as text."""
        if self.half is None:
            return f"{self.mean:.{digits}f}{unit}"
        return f"{self.mean:.{digits}f} ± {self.half:.{digits}f}{unit}"


def figure(values: list[float]) -> Figure:
    """Return mean and interval."""
    if len(values) < 2:
        return Figure(values[0], None)
    half = STUDENT[len(values) - 1] * stdev(values) / len(values) ** 0.5
    return Figure(fmean(values), half)


def main() -> int:
    """Render, or say whether page and plot are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--name", default="prototype_head", help="the folder in docs/results")
    arguments = parser.parse_args()
    files = sorted((RESULTS / arguments.name).glob("*.json"))
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    runs = [result for result in results if "quality" in result]
    times = [result for result in results if "recipes" in result]
    pages = {
        RESULTS / f"{arguments.name}.md": render(runs, times),
        RESULTS / f"{arguments.name}.svg": plot(runs),
    }
    return publish(pages, check=arguments.check)


def seed_of(run: dict[str, Any]) -> int:
    """Return a run's seed."""
    return run["settings"]["seed"]


def plain_ce(runs: list[dict[str, Any]]) -> dict[int, float]:
    """Return the plain model's CE by seed: detached runs have bit for bit the same model."""
    return {seed_of(r): r["quality"]["ce"] for r in of_kind(runs, "method") if detached(r)}


def detached(run: dict[str, Any]) -> bool:
    """Say whether a run's model is the plain one."""
    return run["settings"]["head"]["detach"]


def of_kind(runs: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the runs of one part of the benchmark."""
    return [run for run in runs if run["kind"] == kind]


def methods(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of every method that was run, in the order of the page."""
    found = of_kind(runs, "method")
    by_name = {name: [run for run in found if run["name"] == name] for name in WHAT}
    return {name: group for name, group in by_name.items() if group}


def over_plain(run: dict[str, Any], plain: dict[int, float], key: str) -> float:
    """Return how far a cross-entropy is above the plain model's of the same seed, in percent."""
    base = plain[seed_of(run)]
    return 100 * (run["quality"][key] / base - 1)


def plot(runs: list[dict[str, Any]]) -> str:
    """Return the frontier as SVG."""
    plain = plain_ce(runs)
    points: list[Point] = []
    for name, group in methods(runs).items():
        gap = figure([over_plain(run, plain, "ce") for run in group])
        alone = figure([over_plain(run, plain, "prototype_only_ce") for run in group])
        points.append(Point(name, gap.mean, alone.mean, name == "default"))
    return draw(points, WITHIN)


def render(runs: list[dict[str, Any]], times: list[dict[str, Any]]) -> str:
    """Return the page."""
    plain = plain_ce(runs)
    sections = [
        head_of_page(runs, plain),
        targets(runs, plain, times),
        frontier(runs, plain),
        sweep(runs, plain),
        sizes(runs),
        step_times(times),
        second_control(runs),
        operation(),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def head_of_page(runs: list[dict[str, Any]], plain: dict[int, float]) -> str:
    """Return the introduction."""
    some = methods(runs)["default"][0]
    environment, settings = some["environment"], some["settings"]
    ce = figure(list(plain.values()))
    return f"""# The prototype head, trained

Generated by `python -m benchmarks.prototype_head.render` from the files in
[prototype_head/](prototype_head/), which are written by

    prismlm corpus build sample --out corpus --vocab-size 4096
    python -m benchmarks.prototype_head.measure corpus detached --seed 0        # and 1, 2
    python -m benchmarks.prototype_head.measure corpus attached --seed 0
    python -m benchmarks.prototype_head.measure corpus sweep
    python -m benchmarks.prototype_head.measure corpus sizes
    python -m benchmarks.prototype_head.step_time corpus

`{settings["model"]["preset"]}` ({some["parameters"]:,} parameters),
{settings["head"]["prototypes"]:,} prototypes, {settings["head"]["prototypes_per_token"]} per token,
{settings["steps"]:,} steps, {some["tokens"]:,} tokens of the bundled sample; figures on
{some["quality"]["tokens"]:,} held-out predictions. Same seed, rows and schedule for every method.
The plain model's CE is {ce.show(4)} ({len(plain)} seeds). Intervals are 95 % over seeds (Student's
t); a figure without one is of one seed. Torch {environment["torch"]}, transformers
{environment["transformers"]}, {environment["processor"]}, bf16 autocast. What the figures mean:
[concepts](../concepts.md)."""


Row = tuple[str, str, str, str, bool | None]


def targets(
    runs: list[dict[str, Any]], plain: dict[int, float], times: list[dict[str, Any]]
) -> str:
    """Return what was aimed at, and what came out."""
    group = methods(runs)["default"]
    lines = [
        "## The default",
        "",
        f"{len(group)} seeds. The control is as many random training states as prototypes, "
        "untrained.",
        "",
        "| figure | default | random states | target | |",
        "|---|---|---|---|---|",
    ]
    for name, value, other, target, met in [*quality_rows(group, plain), *time_rows(group, times)]:
        verdict = "" if met is None else "met" if met else "**missed**"
        lines.append(f"| {name} | {value} | {other} | {target} | {verdict} |")
    return "\n".join(lines)


def quality_rows(group: list[dict[str, Any]], plain: dict[int, float]) -> list[Row]:
    """Return name, figure, control, target and verdict of what is asked of the prototypes."""
    gap = figure([over_plain(run, plain, "ce") for run in group])
    alone = figure([over_plain(run, plain, "prototype_only_ce") for run in group])
    control = random_states(group, plain)
    rows: list[Row] = [
        ("CE above the plain model's", gap.show(2, " %"), "–", "≤ 0", gap.mean <= 0),
        (
            "prototype-only CE above the plain model's CE",
            alone.show(2, " %"),
            control.show(1, " %"),
            f"≤ {WITHIN} %",
            alone.mean <= WITHIN,
        ),
    ]
    for key, name, digits, least in (
        ("explained_share", "explained share", 3, EXPLAINED),
        ("fvu", "FVU", 3, None),
        ("agreement", "agreement", 3, None),
        ("in_use", "in use", 4, IN_USE),
        ("usage_perplexity", "usage perplexity", 0, None),
    ):
        trained = figure([run["quality"][key] for run in group])
        beside = figure([run["control"][key] for run in group])
        rows.append(
            (
                name,
                trained.show(digits),
                beside.show(digits),
                "–" if least is None else f"≥ {least}",
                None if least is None else trained.mean >= least,
            )
        )
    return rows


def random_states(group: list[dict[str, Any]], plain: dict[int, float]) -> Figure:
    """Return how far the control's prototype-only CE is above the plain model's CE, in percent."""
    return figure(
        [100 * (r["control"]["prototype_only_ce"] / plain[seed_of(r)] - 1) for r in group]
    )


def time_rows(group: list[dict[str, Any]], times: list[dict[str, Any]]) -> list[Row]:
    """Return the rows of the step time, for each number of threads that it was measured with."""
    settings = group[0]["settings"]
    share = 1 - settings["head"]["initialise_at_step"] / settings["steps"]
    target, rows = f"≤ {STEP:.2f} ×", list[Row]()
    for time in times:
        if time["preset"] != settings["model"]["preset"]:
            continue
        found = time["recipes"]["default"]
        whole = 1 + share * (found["ratio"] - 1)
        name = f"step time with the head in place, {time['environment']['threads']} thread(s)"
        value = f"{found['ratio']:.3f} × ({found['low']:.3f} to {found['high']:.3f})"
        rows += [
            (name, value, "–", target, found["ratio"] <= STEP),
            ("… over the whole run", f"{whole:.3f} ×", "–", target, whole <= STEP),
        ]
    return rows


def frontier(runs: list[dict[str, Any]], plain: dict[int, float]) -> str:
    """Return the table of methods and the plot."""
    lines = [
        "## Ways to train it",
        "",
        "Every row is a recipe in [recipes/prototype_head/](../../recipes/prototype_head/).",
        "",
        "![CE above plain against prototype-only CE above plain](prototype_head.svg)",
        "",
        "| recipe | what | seeds | CE above plain | prototype-only CE above plain "
        "| explained share | FVU | agreement | in use | usage perplexity |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, group in methods(runs).items():
        gap = figure([over_plain(run, plain, "ce") for run in group])
        alone = figure([over_plain(run, plain, "prototype_only_ce") for run in group])
        cells = [
            f"[{name}](../../recipes/prototype_head/{name}.yaml)",
            WHAT[name],
            str(len(group)),
            "0" if detached(group[0]) else gap.show(2, " %"),
            alone.show(2, " %"),
            *quality_cells(group),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    group = methods(runs)["default"]
    control = random_states(group, plain)
    controls = [{"quality": run["control"]} for run in group]
    cells = ["–", "control: random states, untrained", str(len(group)), "0", control.show(1, " %")]
    lines.append("| " + " | ".join([*cells, *quality_cells(controls)]) + " |")
    return "\n".join([*lines, "", reading(runs, plain)])


def reading(runs: list[dict[str, Any]], plain: dict[int, float]) -> str:
    """Return what the table says, with the figures it says it by."""

    def alone(name: str, seed: int | None = None) -> str:
        group = [run for run in methods(runs)[name] if seed in (None, seed_of(run))]
        value = figure([over_plain(run, plain, "prototype_only_ce") for run in group])
        return f"{value.mean:.2f} %"

    attached = [group for group in methods(runs).values() if not detached(group[0])]
    rises = [figure([over_plain(r, plain, "ce") for r in group]).mean for group in attached]
    ends = [
        figure([over_plain(r, plain, "prototype_only_ce") for r in group]).mean
        for group in attached
    ]

    def least_left(kind: str) -> str:
        groups = [g for g in methods(runs).values() if detached(g[0]) == (kind == "detached")]
        return f"{min(figure([r['quality']['fvu'] for r in g]).mean for g in groups):.3f}"

    least, most, best = f"{min(rises):.2f} %", f"{max(rises):.2f} %", f"{min(ends):.2f} %"
    return f"""- **What the head learns to predict matters most.** With the source's losses on the \
same plain model prototypes alone end {alone("detached")} above it, with the KL of their \
prediction {alone("default-early")}; the labels in the place of the model's prediction teach less \
({alone("default-ce")} against {alone("default-quarter")}).
- **Late is better than early**: {alone("default-quarter")} against {alone("default-early")}. \
States keep moving while the model learns; a head placed half way spends all its steps near the \
final ones, and the run pays for it in half of its steps only.
- **Losses that reach the model cost it**: the CE itself rises by {least} to {most} in the mean \
(for intervals see the table), and prototypes alone end {best} above the plain model's at best. \
They buy a smaller residual: FVU {least_left("attached")} at best, {least_left("detached")} of the \
detached heads.
- **Clusters or random states, revival, annealed k** make no difference that these seeds show: \
hardly a prototype is ever out of use.
- **Tried for both targets, {WITHIN} % and {STEP:.2f} × a step**: more states a step teach more, \
at the step time below ({alone("default-all")} on all positions, {alone("default")} on a third, \
{alone("default-quarter")} on a quarter, {alone("default-eighth")} on an eighth). What is left \
of a step's time are the products with P and W and the softmax over V columns; DIV's product is \
formed in half precision for it. {tried(runs, plain)}A larger k or K is in the next table."""


def tried(runs: list[dict[str, Any]], plain: dict[int, float]) -> str:
    """Return what else was varied, one seed each."""
    found = of_kind(runs, "tried")
    if not found:
        return ""
    same = [r for r in methods(runs)["default-quarter"] if seed_of(r) == seed_of(found[0])]
    each = ", ".join(
        f"{run['name']} {over_plain(run, plain, 'prototype_only_ce'):.2f} %"
        for run in [*same, *found]
    )
    return f"Varied at one seed: {each}. "


def quality_cells(group: list[dict[str, Any]]) -> list[str]:
    """Return the figures that every table shows."""
    digits = {"explained_share": 3, "fvu": 3, "agreement": 3, "in_use": 3, "usage_perplexity": 0}
    return [
        figure([run["quality"][key] for run in group]).show(places)
        for key, places in digits.items()
    ]


def sweep(runs: list[dict[str, Any]], plain: dict[int, float]) -> str:
    """Return the table of K and k."""
    found = of_kind(runs, "sweep")
    if not found:
        return ""
    found.sort(key=lambda run: (_shape(run)[1] != 16, _shape(run)))
    lines = ["## K and k", "", "The default at one seed, with one of them changed.", "", *TABLE]
    for run in found:
        base = run["quality"]["ce"]
        lines.append(row(f"{_shape(run)[0]:,} | {_shape(run)[1]}", run, base))
    return "\n".join(lines)


TABLE = [
    "| K | k | prototype-only CE above plain | control | explained share | FVU | agreement "
    "| in use | usage perplexity |",
    "|---|---|---|---|---|---|---|---|---|",
]


def row(name: str, run: dict[str, Any], base: float) -> str:
    """Return one row of a sweep."""
    cells = [
        name,
        f"{100 * (run['quality']['prototype_only_ce'] / base - 1):.2f} %",
        f"{100 * (run['control']['prototype_only_ce'] / base - 1):.1f} %",
        *quality_cells([run]),
    ]
    return "| " + " | ".join(cells) + " |"


def _shape(run: dict[str, Any]) -> tuple[int, int]:
    head = run["settings"]["head"]
    return head["prototypes"], head["prototypes_per_token"]


def sizes(runs: list[dict[str, Any]]) -> str:
    """Return the table of model sizes."""
    others = of_kind(runs, "size")
    if not others:
        return ""
    same = [run for run in methods(runs)["default"] if seed_of(run) == seed_of(others[0])]
    found = sorted([*others, *same], key=lambda run: run["parameters"])
    lines = [
        "## Size of the model",
        "",
        "The default beside models of other sizes, same text and steps, one seed.",
        "",
        TABLE[0].replace("| K | k |", "| model | parameters | CE |"),
        TABLE[1] + "---|",
    ]
    for run in found:
        base = run["quality"]["ce"]
        preset = run["settings"]["model"]["preset"]
        lines.append(row(f"{preset} | {run['parameters']:,} | {base:.3f}", run, base))
    return "\n".join(lines)


def step_times(times: list[dict[str, Any]]) -> str:
    """Return the table of step times."""
    lines = [
        "## Time of a step",
        "",
        "Steps with and without the head in turns in one run "
        "(`benchmarks/prototype_head/step_time.py`); the "
        "ratio of neighbours, its median and a 95 % bootstrap interval. The head takes part in "
        "the second half of the default's steps only.",
        "",
        "| model | recipe | threads | ratio | interval |",
        "|---|---|---|---|---|",
    ]
    for time in times:
        for name, found in time["recipes"].items():
            lines.append(
                f"| {time['preset']} | {name} | {time['environment']['threads']} | "
                f"{found['ratio']:.3f} | "
                f"{found['low']:.3f} to {found['high']:.3f} |"
            )
    return "\n".join(lines) if times else ""


def second_control(runs: list[dict[str, Any]]) -> str:
    """Return what shuffling the map from prototypes to text does, if it was measured with them."""
    result = json.loads((RESULTS / "first_light.json").read_text(encoding="utf-8"))
    default = methods(runs)["default"][0]["settings"]
    same = all(
        result["recipe"][section].get(key) == value
        for section in ("model", "losses")
        for key, value in default[section].items()
    )
    if not same:
        return ""
    heading, _, *table = domains(result["domain_share"])
    lines = [
        heading,
        "",
        "The demo's model, trained with the default (seed "
        f"{result['recipe']['seed']}; [first light](first_light.md)). Its second control leaves "
        "the prototypes and shuffles which text they stand for.",
        "",
        *table,
    ]
    return "\n".join(lines).rstrip()


def operation() -> str:
    """Return the table of the routing operation by itself."""
    path = RESULTS / "route.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    environment = result["environment"]
    lines = [
        "## Routing by itself",
        "",
        "From `route.json`, by `python -m benchmarks.prototype_head.route`: medians of ratios "
        "of rounds "
        f"in turns, on {environment['machine']}, torch {environment['torch']}, with other work "
        "beside "
        f"(load {environment['load_before']} to {environment['load_after']}). *Forward*: `route` "
        "against the bare product z Pᵀ of the same dtype; targets ≤ 2 ×. *Step*: with losses and "
        "backward, how many times slower the same is with autograd through the dense matrix; "
        "target ≥ 3 ×. *Memory*: how many times more that takes; target ≥ 8 ×. The targets are for "
        "the larger shape.",
        "",
        "| N, d, K, k | what | dtype | threads | ratio |",
        "|---|---|---|---|---|",
    ]
    for found in result["results"]:
        shape = ", ".join(f"{size:,}" for size in found["shape"].values())
        against = "product" if found["what"] == "forward" else "dense"
        ratio = found["ratios"][against]
        ratio = ratio["median"] if isinstance(ratio, dict) else ratio
        cells = [
            shape,
            found["what"],
            found.get("dtype", "float32"),
            str(found.get("threads", "–")),
            f"{ratio:.2f} ×",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Where a CPU multiplies bf16 numbers itself, as this one does, routing uses such a "
        "product, of float32 inputs too, to leave most pairs out, and sums the rest in float32: "
        "its choice must not depend on the rounding of scores. At the smaller shape what is "
        "beside the product weighs more.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
