"""The section on ways to train the prototype head: their table, their plot and what they say."""

from __future__ import annotations

from typing import Any

from benchmarks.prototype_head.frontier_plot import Point, draw
from benchmarks.prototype_head.runs_compared import (
    WHAT,
    detached,
    figure,
    methods,
    of_kind,
    over_plain,
    plain_ce,
    quality_cells,
    random_states,
    seed_of,
)
from benchmarks.prototype_head.targets import STEP, WITHIN


def plot(runs: list[dict[str, Any]]) -> str:
    """Return the frontier as SVG."""
    plain = plain_ce(runs)
    points: list[Point] = []
    for name, group in methods(runs).items():
        gap = figure([over_plain(run, plain, "ce") for run in group])
        alone = figure([over_plain(run, plain, "prototype_only_ce") for run in group])
        points.append(Point(name, gap.mean, alone.mean, name == "default"))
    return draw(points, WITHIN)


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
