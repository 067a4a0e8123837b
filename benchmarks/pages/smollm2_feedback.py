"""Runs of feedback on SmolLM2 by settings, and what they say, for ``smollm2_feedback.md``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.shared.over_seeds import Claim, answers, spread
from benchmarks.uncertainty_feedback.smollm2 import NONE, OWN, SHUFFLED

Run = dict[str, Any]
Runs = dict[str, dict[int, Run]]
"""By arm and seed."""
Sums = tuple[list[float], list[int]]
"""Losses of each document in nats, and its predictions."""
WANTED_STEPS, WANTED_TOKENS = 300, 2048
"""Of the run that the question was put for: steps, and tokens of each."""
# What is below what: an arm and the signal that it is fed, twice.
CONTRASTS = {
    "own signal below the shuffled control": ((OWN, OWN), (SHUFFLED, SHUFFLED)),
    "own signal below no feedback": ((OWN, OWN), (NONE, NONE)),
    "own signal below the same model fed shuffled codes": ((OWN, OWN), (OWN, SHUFFLED)),
    "shuffled control below no feedback": ((SHUFFLED, SHUFFLED), (NONE, NONE)),
}


class Section(NamedTuple):
    """What the runs of one setting say."""

    settings: dict[str, Any]
    seeds: list[int]
    held: list[int]
    lines: list[str]
    helps: bool
    control_helps: bool
    losses: list[list[str]]
    paired: list[list[str]]
    table: dict[str, str]


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the sections, the longest runs first, and the short runs of the rate's choice."""
    runs = read("smollm2_feedback.json")["runs"]
    groups: dict[str, Runs] = {}
    for run in runs:
        arms = groups.setdefault(json.dumps(run["settings"], sort_keys=True), {})
        arms.setdefault(run["arm"], {})[run["seed"]] = run
    longest = sorted(groups.values(), key=lambda group: -_trained_on(group))
    sections = [_section(group) for group in longest if SHUFFLED in group]
    tried = [
        run
        for group in longest
        if SHUFFLED not in group
        for seeds in group.values()
        for run in seeds.values()
    ]
    return {
        "sections": sections,
        "helps": any(section.helps for section in sections),
        "wanted": (WANTED_STEPS, WANTED_TOKENS),
        "tried": [(run, np.mean(run["curve"][-5:])) for run in tried],
        "environments": [run["environment"] for run in runs],
    }


def _trained_on(group: Runs) -> int:
    """Return the tokens of training."""
    settings = next(iter(group[OWN].values()))["settings"]
    return settings["steps"] * settings["batch"] * settings["length"]


def _section(group: Runs) -> Section:
    seeds = sorted(group[OWN])
    first = group[OWN][seeds[0]]
    pairs = {words: {seed: _pair(group, words, seed) for seed in seeds} for words in CONTRASTS}
    found = answers(
        [
            Claim(words, *({s: _mean(*both[side]) for s, both in by.items()} for side in (0, 1)))
            for words, by in pairs.items()
        ]
    )
    fed = [run for arm in (OWN, SHUFFLED) for run in group[arm].values()]
    shares = [run["entropy"] for run in group[OWN].values()]
    tables = [run["table"] for run in fed]
    return Section(
        settings=first["settings"],
        seeds=seeds,
        held=first["tokens"],
        lines=[answer.line for answer in found],
        helps=all(answer.sign < 0 for answer in found[:2]),
        control_helps=found[3].sign < 0 <= found[0].sign,
        losses=_losses(group),
        paired=[
            [words, *("{:+.4f} ± {:.4f}".format(*paired(*both)) for both in by.values())]
            for words, by in pairs.items()
        ],
        table={
            "parameters": f"{tables[0]['parameters']:,}",
            "deviation": spread((table["deviation"] for table in tables), ".4f"),
            "of_tokens": f"{tables[0]['deviation_of_tokens']:.4f}",
            "codes": spread((table["codes_seen"] for table in tables), ",.0f"),
            "mean": spread((share["mean"] for share in shares), ".1%"),
            "sd": spread((share["sd"] for share in shares), ".1%"),
        },
    )


def _pair(group: Runs, words: str, seed: int) -> tuple[Sums, Sums]:
    """Return both sides of a contrast with a seed."""
    found: list[Sums] = []
    for arm, signal in CONTRASTS[words]:
        runs = group[arm]
        # A model that is not trained is the same with every seed.
        run = runs[seed] if seed in runs else next(iter(runs.values()))
        found.append((run["losses"][signal], run["tokens"]))
    return found[0], found[1]


def _mean(sums: list[float], tokens: list[int]) -> float:
    return sum(sums) / sum(tokens)


def paired(ours: Sums, others: Sums) -> tuple[float, float]:
    """Return the difference per token and its standard error over documents.

        r = Σ d_i / Σ t_i,   SE = √(n / (n − 1) · Σ (d_i − r t_i)²) / Σ t_i

    with d the difference of a document's summed losses and t its predictions.
    """
    apart, tokens = np.subtract(ours[0], others[0]), np.array(ours[1], dtype=np.float64)
    ratio, count = apart.sum() / tokens.sum(), len(tokens)
    error = np.sqrt(count / (count - 1) * np.square(apart - ratio * tokens).sum()) / tokens.sum()
    return float(ratio), float(error)


def _losses(group: Runs) -> list[list[str]]:
    rows: list[list[str]] = []
    for arm in (NONE, OWN, SHUFFLED):
        runs = list(group[arm].values())
        for signal in runs[0]["losses"]:
            loss = spread((_mean(run["losses"][signal], run["tokens"]) for run in runs), ".4f")
            ends = [[run["curve"][at] for run in runs if run["curve"]] for at in (0, -1)]
            curve = " → ".join(spread(end, ".3f") for end in ends) if ends[0] else "not trained"
            rows.append([arm, signal, loss, curve])
    return rows
