"""Runs of uncertainty feedback by arm and seed, checks of trained models, and costs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.shared.over_seeds import Figures, differences, spread
from benchmarks.shared.pages import ranged
from benchmarks.uncertainty_feedback import smollm2
from benchmarks.uncertainty_feedback.checks import FED
from benchmarks.uncertainty_feedback.measure import (
    LITERAL,
    NEUTRAL,
    OWN,
    PLAIN,
    PREVIOUS,
    SHUFFLED,
    SWEEP,
    TRAIN,
    ZERO,
)

Row = dict[str, Any]
Arms = dict[str, dict[int, Row]]
SIGNIFICANT = 0.05
CHECKS = ("ablation", "attention", "hedging", "recovery", "probe")
PARTS = {"decode": "decoding", "prefill": "prefill", "step": "training step"}
CONTROLS = {
    "two passes": "shuffled",
    "65,536 levels, interpolated": "interpolated, shuffled",
    "interpolated, from zero": "interpolated, from zero, shuffled",
}
"""Arms with the control that has the same table and a shuffled signal."""
# Contrasts on SmolLM2: an arm and the signal that it is fed, twice.
NONE, KEPT, PERMUTED = smollm2.ARMS
CONTRASTS = {
    "own signal less shuffled control": ((KEPT, KEPT), (PERMUTED, PERMUTED)),
    "own signal less no feedback": ((KEPT, KEPT), (NONE, NONE)),
    "own signal less the same model fed shuffled codes": ((KEPT, KEPT), (KEPT, PERMUTED)),
    "shuffled control less no feedback": ((PERMUTED, PERMUTED), (NONE, NONE)),
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what the page's tables show."""
    runs = read("uncertainty_feedback/*.json")
    literal = read("uncertainty_literal/*.json")
    checks = sorted(read("uncertainty_checks/*.json"), key=lambda row: list(FED).index(row["arm"]))
    timings = {
        "CPU": read("uncertainty_overhead.json"),
        "GPU": read("uncertainty_overhead_cuda.json"),
    }
    arms, previous = by_arm(runs), by_arm(literal)
    own = {
        name: runs_of_arm
        for name, runs_of_arm in arms.items()
        if signal_of(a_run(runs_of_arm)) == OWN
    }
    validated = [row["validation"] for runs_of_arm in own.values() for row in runs_of_arm.values()]
    return {
        "first": a_run(arms["no feedback"]),
        "losses": _losses(arms),
        "signals": [_signals(name, runs_of_arm) for name, runs_of_arm in own.items()],
        "recursion_gap": max(abs(one["sample"]["differences"][OWN]["mean"]) for one in validated),
        "literal": differences([(losses(previous[PREVIOUS]), losses(previous[PLAIN]))])[0],
        "environments": [row["environment"] for row in [*runs, *literal]],
        "checks": checks,
        "checked": [row["arm"] for row in checks],
        "answers": [[check, *(answer(check, row["report"]) for row in checks)] for check in CHECKS],
        "timings": timings,
        "costs": _costs(timings),
        "smollm2": _smollm2(read("smollm2_feedback.json")["runs"]),
    }


def by_arm(runs: list[Row]) -> Arms:
    """Return runs by arm, in the order of the script, and seed."""
    arms: Arms = defaultdict(dict)
    for row in sorted(runs, key=lambda row: row["seed"]):
        arms[row["arm"]][row["seed"]] = row
    return {name: arms[name] for name in TRAIN | SWEEP | LITERAL if name in arms}


def feedback_of(row: Row) -> Row | None:
    """Return the settings of the feedback that a model was trained with, or None."""
    # Files of docs/results are records: most are of when recipes had a section `uncertainty`.
    settings = row["settings"]
    return settings.get("uncertainty_feedback", settings.get("uncertainty"))


def signal_of(row: Row) -> str:
    """Return the signal that a model was trained with: it is judged by the loss with that."""
    feedback = feedback_of(row)
    if feedback is None:
        return PLAIN
    if feedback.get("signal") == "previous_batch":
        return PREVIOUS
    if feedback["passes"] == 1:
        return NEUTRAL
    return SHUFFLED if feedback.get("signal") == "shuffled" else OWN


def loss(row: Row) -> float:
    """Return nats per token with the signal that a model was trained with."""
    return row["validation"]["all"]["losses"][signal_of(row)]


def losses(runs: dict[int, Row]) -> dict[int, float]:
    """Return an arm's losses by seed."""
    return {seed: loss(row) for seed, row in runs.items()}


def a_run(runs: dict[int, Row]) -> Row:
    """Return an arm's run of the first seed."""
    return next(iter(runs.values()))


def _losses(arms: Arms) -> list[list[str]]:
    """Return an arm's loss beside that without feedback and beside its control."""
    base = losses(arms["no feedback"])
    loss_of: dict[str, Figures] = {name: losses(rows) for name, rows in arms.items()}
    others = [name for name in arms if name != "no feedback"]
    pairs = [(loss_of[name], base) for name in others]
    pairs += [(loss_of[name], loss_of[control]) for name, control in CONTROLS.items()]
    apart = differences(pairs)
    less_base = dict(zip(others, apart, strict=False))
    less_control = dict(zip(CONTROLS, apart[len(others) :], strict=True))
    return [
        [
            name,
            spread(loss_of[name].values(), ".4f"),
            less_base[name].shown() if name in less_base else "",
            less_control[name].shown() if name in less_control else "",
        ]
        for name in arms
    ]


def _signals(name: str, runs: dict[int, Row]) -> list[str]:
    """Return what other signals cost a trained model, and whether all cost in every seed."""
    every = [row["validation"]["all"]["differences"] for row in runs.values()]
    signals = (ZERO, NEUTRAL, SHUFFLED)
    uses = all(one[signal]["low"] > 0 for one in every for signal in signals)
    return [
        name,
        *(spread((one[signal]["mean"] for one in every), "+.3f") for signal in signals),
        "yes, in every seed" if uses else "not shown",
    ]


def _excludes_0(interval: Row | None, side: int = 1) -> bool:
    """Return whether an interval is above 0, or below for side −1."""
    end: Any = interval and interval["low" if side > 0 else "high"]
    return end is not None and side * end > 0


def answer(check: str, report: Row) -> str:
    """Return the figure of a check with its interval, bold where the expectation holds."""
    form = "+.3f"
    if check == "ablation":
        rows = {one["signal"]: one for one in report["ablation"]["rows"]}
        figure = rows["shuffled"]["change"]
        shown = _excludes_0(figure)
    elif check == "attention":
        if report["attention"] is None:
            return f"not done: {report['left_out']['attention']}"
        layers = report["attention"]["rows"]
        later = layers[len(layers) // 2 :]
        figure = max(later, key=lambda one: one["correlation"])["added"]
        more = (one for one in later if one["correlation"] > 0 and one["q"] <= SIGNIFICANT)
        shown = any(_excludes_0(one["added"]) for one in more)
    elif check == "hedging":
        _, none, shuffled = report["hedging"]["rows"]
        figure, form = none.get("own_less"), "+.4f"
        shown = _excludes_0(figure) and _excludes_0(shuffled.get("own_less"))
    elif check == "recovery":
        _, zero, figure = (row.get("own_loss_less") for row in report["mistakes"]["rows"])
        shown = _excludes_0(zero, -1) and _excludes_0(figure, -1)
    else:
        layers = [one for one in report["probe"]["rows"] if one["code"]["value"] is not None]
        best = max(layers, key=lambda one: one["code"]["value"], default={})
        figure = best.get("added")
        shown = _excludes_0(figure) and _excludes_0(best.get("code"))
    if figure is None or figure["value"] is None:
        return "nothing to compare"
    text = ranged(figure, "value", form)
    return f"**{text}**" if shown else text


def _smollm2(runs: list[Row]) -> Row:
    """Return the differences of each setting, the longest runs first."""
    by_settings: dict[str, Arms] = {}
    for run in runs:
        arms = by_settings.setdefault(json.dumps(run["settings"], sort_keys=True), {})
        arms.setdefault(run["arm"], {})[run["seed"]] = run
    # Runs without a control only chose the learning rate.
    groups = [group for group in by_settings.values() if PERMUTED in group]
    groups.sort(key=lambda group: -a_run(group[KEPT])["settings"]["steps"])
    settings = [a_run(group[KEPT])["settings"] for group in groups]
    columns = [_contrasts(group) for group in groups]
    return {
        "settings": settings,
        "titles": [
            f"table {'alone' if one['table_alone'] else 'and adapters'}, {one['steps']} steps"
            for one in settings
        ],
        "contrasts": [[words, *cells] for words, *cells in zip(CONTRASTS, *columns, strict=True)],
        "environments": [run["environment"] for run in runs],
    }


def _contrasts(arms: Arms) -> list[str]:
    def by_seed(arm: str, signal: str) -> Figures:
        # A model that is not trained is the same with every seed.
        runs = [arms[arm].get(seed, a_run(arms[arm])) for seed in arms[KEPT]]
        losses = [sum(run["losses"][signal]) / sum(run["tokens"]) for run in runs]
        return dict(zip(arms[KEPT], losses, strict=True))

    pairs = [(by_seed(*ours), by_seed(*other)) for ours, other in CONTRASTS.values()]
    return [difference.shown() for difference in differences(pairs)]


def _costs(timings: dict[str, Row]) -> list[list[str]]:
    """Return a row for each part and form that was timed on both devices."""
    timed = [result["timed"] for result in timings.values()]
    return [
        [PARTS[part], form, *(ranged(one[part][form]["elapsed"], "ratio", ".4f") for one in timed)]
        for part in PARTS
        for form in ("one pass", "two passes")
        if form in timed[0][part]
    ]
