"""The tables of the prototype head over K, k and the size of the model."""

from __future__ import annotations

from typing import Any

from benchmarks.prototype_head.runs_compared import methods, of_kind, quality_cells, seed_of


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
