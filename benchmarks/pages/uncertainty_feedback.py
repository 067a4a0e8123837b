"""Runs of uncertainty feedback by arm and seed, checks of trained models, and costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.shared.over_seeds import Figures, differences, spread
from benchmarks.shared.pages import ranged
from benchmarks.uncertainty_feedback.checks import FED
from benchmarks.uncertainty_feedback.measure import LITERAL, SWEEP, TRAIN
from benchmarks.uncertainty_feedback.validation import (
    NEUTRAL,
    OWN,
    PLAIN,
    PREVIOUS,
    SHUFFLED,
    ZERO,
)

Row = dict[str, Any]
Arms = dict[str, dict[int, Row]]
SIGNIFICANT = 0.05
PARTS = {"decode": "decoding", "prefill": "prefill", "step": "training step"}
CONTROLS = {
    "two passes": "shuffled",
    "65,536 levels, interpolated": "interpolated, shuffled",
    "interpolated, from zero": "interpolated, from zero, shuffled",
}
"""Arms with the control that has the same table and a shuffled signal."""


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
    own = {name: found for name, found in arms.items() if signal_of(a_run(found)) == OWN}
    fed = [
        row["table"]["codes_seen"] / _levels(row)
        for found in own.values()
        for row in found.values()
    ]
    validated = [row["validation"] for found in own.values() for row in found.values()]
    return {
        "first": a_run(arms["no feedback"]),
        "losses": _losses(arms),
        "signals": [_signals(name, found) for name, found in own.items()],
        "codes_fed": (min(fed), max(fed)),
        "recursion_gap": max(abs(one["sample"]["differences"][OWN]["mean"]) for one in validated),
        "code_distance": max(one["codes"][OWN]["distance"] for one in validated),
        "literal": differences([(losses(previous[PREVIOUS]), losses(previous[PLAIN]))])[0],
        "environments": [row["environment"] for row in [*runs, *literal]],
        "checks": checks,
        "checked": [row["arm"] for row in checks],
        "answers": [
            [title, *(answer(row["report"]) for row in checks)] for title, answer in ANSWERS.items()
        ],
        "timings": timings,
        "costs": _costs(timings),
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


def losses(found: dict[int, Row]) -> dict[int, float]:
    """Return an arm's losses by seed."""
    return {seed: loss(row) for seed, row in found.items()}


def a_run(found: dict[int, Row]) -> Row:
    """Return an arm's run of the first seed."""
    return next(iter(found.values()))


def _levels(row: Row) -> int:
    return (feedback_of(row) or {})["levels"]


def _losses(arms: Arms) -> list[list[str]]:
    """Return an arm's loss beside that without feedback and beside its control."""
    base = losses(arms["no feedback"])
    found: dict[str, Figures] = {name: losses(rows) for name, rows in arms.items()}
    others = [name for name in arms if name != "no feedback"]
    pairs = [(found[name], base) for name in others]
    pairs += [(found[name], found[control]) for name, control in CONTROLS.items()]
    apart = differences(pairs)
    less_base = dict(zip(others, apart, strict=False))
    less_control = dict(zip(CONTROLS, apart[len(others) :], strict=True))
    return [
        [
            name,
            spread(found[name].values(), ".4f"),
            less_base[name].shown() if name in less_base else "",
            less_control[name].shown() if name in less_control else "",
        ]
        for name in arms
    ]


def _signals(name: str, found: dict[int, Row]) -> list[str]:
    """Return what other signals cost a trained model, and whether all cost in every seed."""
    every = [row["validation"]["all"]["differences"] for row in found.values()]
    signals = (ZERO, NEUTRAL, SHUFFLED)
    uses = all(one[signal]["low"] > 0 for one in every for signal in signals)
    return [
        name,
        *(spread((one[signal]["mean"] for one in every), "+.3f") for signal in signals),
        "yes, in every seed" if uses else "not shown",
    ]


def _interval(found: Row | None, form: str = "+.3f") -> str:
    if found is None or found["value"] is None:
        return "nothing to compare"
    return ranged(found, "value", form)


def _marked(shown: bool, text: str) -> str:
    return f"**{text}**" if shown else text


def _above(found: Row | None) -> bool:
    return found is not None and found["low"] is not None and found["low"] > 0


def _below(found: Row | None) -> bool:
    return found is not None and found["high"] is not None and found["high"] < 0


def _ablation(report: Row) -> str:
    conditions = {one["signal"]: one for one in report["ablation"]["rows"]}
    change = conditions["shuffled"]["change"]
    return _marked(_above(change), _interval(change))


def _attention(report: Row) -> str:
    if report["attention"] is None:
        return f"not done: {report['left_out']['attention']}"
    layers = report["attention"]["rows"]
    later = layers[len(layers) // 2 :]
    best = max(later, key=lambda one: one["correlation"])
    more = (one for one in later if one["correlation"] > 0 and one["q"] <= SIGNIFICANT)
    return _marked(any(_above(one["added"]) for one in more), _interval(best["added"]))


def _hedging(report: Row) -> str:
    _, none, shuffled = report["hedging"]["rows"]
    both = _above(none.get("own_less")) and _above(shuffled.get("own_less"))
    return _marked(both, _interval(none.get("own_less"), "+.4f"))


def _recovery(report: Row) -> str:
    _, zero, shuffled = (row.get("own_loss_less") for row in report["mistakes"]["rows"])
    return _marked(_below(zero) and _below(shuffled), _interval(shuffled))


def _probe(report: Row) -> str:
    layers = [one for one in report["probe"]["rows"] if one["code"]["value"] is not None]
    if not layers:
        return "nothing to compare"
    best = max(layers, key=lambda one: one["code"]["value"])
    shown = _above(best["added"]) and _above(best["code"])
    return _marked(shown, _interval(best["added"]))


ANSWERS: dict[str, Callable[[Row], str]] = {
    "ablation": _ablation,
    "attention": _attention,
    "hedging": _hedging,
    "recovery": _recovery,
    "probe": _probe,
}


def _costs(timings: dict[str, Row]) -> list[list[str]]:
    """Return a row for each part and form that was timed on both devices."""
    timed = [result["timed"] for result in timings.values()]
    return [
        [PARTS[part], form, *(ranged(one[part][form]["elapsed"], "ratio", ".4f") for one in timed)]
        for part in PARTS
        for form in timed[0][part]
        if form != "no feedback, again"
    ]
