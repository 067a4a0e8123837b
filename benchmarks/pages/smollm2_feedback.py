"""Runs of feedback on SmolLM2 by settings, and what they say, for ``smollm2_feedback.md``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.shared.over_seeds import Figures, differences, spread
from benchmarks.uncertainty_feedback.smollm2 import NONE, OWN, SHUFFLED

Run = dict[str, Any]
Runs = dict[str, dict[int, Run]]
"""By arm and seed."""
WANTED_STEPS, WANTED_TOKENS = 300, 2048
"""Of the run that the question needs: steps, and tokens of each."""
# Names of contrasts, with an arm and the signal that it is fed, twice.
CONTRASTS = {
    "own signal less shuffled control": ((OWN, OWN), (SHUFFLED, SHUFFLED)),
    "own signal less no feedback": ((OWN, OWN), (NONE, NONE)),
    "own signal less the same model fed shuffled codes": ((OWN, OWN), (OWN, SHUFFLED)),
    "shuffled control less no feedback": ((SHUFFLED, SHUFFLED), (NONE, NONE)),
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the differences of each setting, the longest runs first, and the losses of those."""
    runs = read("smollm2_feedback.json")["runs"]
    by_settings: dict[str, Runs] = {}
    for run in runs:
        arms = by_settings.setdefault(json.dumps(run["settings"], sort_keys=True), {})
        arms.setdefault(run["arm"], {})[run["seed"]] = run
    # Runs without a control only chose the learning rate.
    groups = sorted(
        (one for one in by_settings.values() if SHUFFLED in one),
        key=lambda group: -_run(group)["settings"]["steps"],
    )
    columns = [_differences(group) for group in groups]
    return {
        "settings": [_run(group)["settings"] for group in groups],
        "titles": [_title(group) for group in groups],
        "contrasts": [
            [words, *(column[at] for column in columns)] for at, words in enumerate(CONTRASTS)
        ],
        "losses": _losses(groups[0]),
        "held": _run(groups[0])["tokens"],
        "table_parameters": _run(groups[0])["table"]["parameters"],
        "wanted": (WANTED_STEPS, WANTED_TOKENS),
        "environments": [run["environment"] for run in runs],
    }


def _run(group: Runs) -> Run:
    return next(iter(group[OWN].values()))


def _title(group: Runs) -> str:
    settings = _run(group)["settings"]
    what = "table alone" if settings["table_alone"] else "table and adapters"
    return f"{what}, {settings['steps']} steps"


def _differences(group: Runs) -> list[str]:
    def by_seed(arm: str, signal: str) -> Figures:
        # A model that is not trained is the same with every seed.
        only = next(iter(group[arm].values()))
        return {seed: _loss(group[arm].get(seed, only), signal) for seed in sorted(group[OWN])}

    pairs = [(by_seed(*ours), by_seed(*other)) for ours, other in CONTRASTS.values()]
    return [difference.shown() for difference in differences(pairs)]


def _loss(run: Run, signal: str) -> float:
    return sum(run["losses"][signal]) / sum(run["tokens"])


def _losses(group: Runs) -> list[list[str]]:
    rows: list[list[str]] = []
    for arm in (NONE, OWN, SHUFFLED):
        runs = list(group[arm].values())
        ends = [statistics.fmean(run["curve"][at] for run in runs) for at in (0, -1)]
        curve = " → ".join(f"{end:.3f}" for end in ends)
        rows += [
            [arm, signal, spread((_loss(run, signal) for run in runs), ".4f"), curve]
            for signal in runs[0]["losses"]
        ]
    return rows
