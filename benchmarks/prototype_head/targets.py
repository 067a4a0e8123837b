"""The section on what was aimed at with the prototype head's default, and what came out."""

from __future__ import annotations

from typing import Any

from benchmarks.prototype_head.runs_compared import figure, methods, over_plain, random_states
from benchmarks.shared.pages import table_head

WITHIN, EXPLAINED, IN_USE, STEP = 2.5, 0.97, 0.97, 1.10


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
        *table_head("| figure | default | random states | target | |"),
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
