"""Runs of uncertainty feedback by arm and seed, their losses, and both as text."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.shared.over_seeds import spread
from benchmarks.shared.pages import ranged
from benchmarks.uncertainty_feedback.measure import LITERAL, SWEEP, TRAIN
from benchmarks.uncertainty_feedback.validation import NEUTRAL, OWN, PLAIN, PREVIOUS, SHUFFLED

Row = dict[str, Any]
Arms = dict[str, dict[int, Row]]


def by_arm(runs: list[Row]) -> Arms:
    """Return runs by arm, in the order of the script, and seed."""
    arms: Arms = defaultdict(dict)
    for row in runs:
        arms[row["arm"]][row["seed"]] = row
    order = list(TRAIN | SWEEP | LITERAL)
    ranked = sorted(arms, key=lambda name: order.index(name) if name in order else len(order))
    return {name: dict(sorted(arms[name].items())) for name in ranked}


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


def losses(arms: Arms, name: str) -> dict[int, float]:
    """Return an arm's losses by seed."""
    return {seed: loss(row) for seed, row in arms.get(name, {}).items()}


def short(name: str) -> str:
    """Return an arm's name without its backbone."""
    return name.removeprefix("ProtoT, ")


def a_run(found: dict[int, Row]) -> Row:
    """Return an arm's run of the first seed."""
    return next(iter(found.values()))


def seeds_of(found: dict[int, Row]) -> str:
    """Return how many seeds an arm has."""
    return "one seed" if len(found) == 1 else str(len(found))


def interval(found: list[Row]) -> str:
    """Return the mean of differences and their range, or the interval of the only one."""
    if len(found) == 1:
        return ranged(found[0], "mean", "+.4f")
    return spread((one["mean"] for one in found), "+.4f")
