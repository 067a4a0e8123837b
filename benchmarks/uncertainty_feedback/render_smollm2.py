"""Write docs/results/smollm2_feedback.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from benchmarks.shared.over_seeds import HOW, Answer, Claim, answers, spread
from benchmarks.shared.pages import (
    page_options,
    publish,
    read_result,
    runs_made,
    several,
    table_head,
)
from benchmarks.uncertainty_feedback.smollm2 import NONE, OWN, SHUFFLED

Run = dict[str, Any]
Runs = dict[str, dict[int, Run]]
"""By arm and seed."""
WANTED_STEPS, WANTED_TOKENS = 300, 2048
"""Of the run that the question was put for: steps, and tokens of each."""


class Contrast(NamedTuple):
    """That one loss is smaller than another on the same documents.

    Attributes:
        words: what is.
        ours: an arm, and the signal that it is fed.
        others: likewise.
    """

    words: str
    ours: tuple[str, str]
    others: tuple[str, str]


CONTRASTS = (
    Contrast("own signal below the shuffled control", (OWN, OWN), (SHUFFLED, SHUFFLED)),
    Contrast("own signal below no feedback", (OWN, OWN), (NONE, NONE)),
    Contrast("own signal below the same model fed shuffled codes", (OWN, OWN), (OWN, SHUFFLED)),
    Contrast("shuffled control below no feedback", (SHUFFLED, SHUFFLED), (NONE, NONE)),
)


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    found = read_result(given.results / "smollm2_feedback.json", "uncertainty_feedback.smollm2")
    page = {given.results / "smollm2_feedback.md": render(found["runs"])}
    return publish(page, check=given.check)


def render(runs: list[Run]) -> str:
    """Return the page."""
    groups = [group for group in _by_settings(runs) if SHUFFLED in group]
    tried = [run for group in _by_settings(runs) if SHUFFLED not in group for run in _all(group)]
    lines = [
        "# Uncertainty feedback on a model that predicts well",
        "",
        "Generated from `smollm2_feedback.json` by "
        "`python -m benchmarks.uncertainty_feedback.render_smollm2`; the JSON by, with a corpus "
        "of the model's tokenizer,",
        "",
        *(f"    {_command(_settings(group))}" for group in groups),
        "",
        runs_made([run["environment"] for run in runs]),
        "",
        "A table of codes that starts at zero is put beside "
        "SmolLM2-135M-Instruct, which then predicts as it did, and is trained with the "
        "codes of two passes: the first gives the "
        "entropies, the second reads them. The control is the same with the codes permuted over "
        "all positions of a step, drawn anew each time: its rows are visited as often, and its "
        "codes say nothing of where they arrive. Both can learn what any vector at every position "
        "is good for, such as the style of the corpus; only what the own signal has beyond the "
        "control is uncertainty.",
        "",
    ]
    if not any(_as_wanted(_settings(group)) for group in groups):
        lines += [
            f"The run of {WANTED_STEPS} steps of {WANTED_TOKENS:,} tokens, three seeds and three "
            "arms, with adapters in the last third of the blocks, waits for a GPU: `python -m "
            "benchmarks.uncertainty_feedback.smollm2 MODEL CORPUS --device cuda`.",
            "",
        ]
    for group in groups:
        lines += _section(group)
    lines += _rates(tried)
    return "\n".join(lines[:-1]) + "\n"


def _by_settings(runs: list[Run]) -> list[Runs]:
    groups: dict[str, Runs] = {}
    for run in runs:
        arms = groups.setdefault(json.dumps(run["settings"], sort_keys=True), {})
        arms.setdefault(run["arm"], {})[run["seed"]] = run
    return sorted(groups.values(), key=lambda group: -_trained_on(_settings(group)))


def _trained_on(settings: dict[str, Any]) -> int:
    """Return the tokens of training."""
    return settings["steps"] * settings["batch"] * settings["length"]


def _all(group: Runs) -> list[Run]:
    return [run for seeds in group.values() for run in seeds.values()]


def _settings(group: Runs) -> dict[str, Any]:
    return _all(group)[0]["settings"]


def _as_wanted(settings: dict[str, Any]) -> bool:
    tokens = settings["batch"] * settings["length"]
    return settings["steps"] >= WANTED_STEPS and tokens >= WANTED_TOKENS


def _command(settings: dict[str, Any]) -> str:
    options = ("steps", "batch", "length", "table_rate", "documents")
    words = [f"--{name.replace('_', '-')} {settings[name]}" for name in options]
    words += ["--table-alone"] * settings["table_alone"]
    return f"python -m benchmarks.uncertainty_feedback.smollm2 MODEL CORPUS {' '.join(words)}"


def _section(group: Runs) -> list[str]:
    """Return what one set of runs says."""
    settings = _settings(group)
    what = "the table alone" if settings["table_alone"] else "table and adapters"
    tokens = settings["batch"] * settings["length"]
    held = group[OWN][min(group[OWN])]["tokens"]
    claims = [_claim(group, contrast) for contrast in CONTRASTS]
    found = answers(claims)
    helps = all(answer.sign < 0 for answer in found[:2])
    verdict = "**it does**" if helps else "**not shown**"
    lines = [
        f"## {what.capitalize()}, {settings['steps']} steps of {tokens:,} tokens",
        "",
        f"Does the signal help? On these runs: {verdict}. Held-out cross-entropy, on the first "
        f"{settings['length']} tokens or fewer of {len(held)} documents held out, "
        f"{sum(held):,} predictions, "
        f"{len(group[OWN])} {'seeds' if len(group[OWN]) > 1 else 'seed'}:",
        "",
        *(answer.line for answer in found),
        "",
        *_what_the_control_gains(found),
        HOW,
        "",
    ]
    if not _as_wanted(settings):
        lines += [
            f"**These are {settings['steps']} steps of {tokens:,} tokens, not the "
            f"{WANTED_STEPS} steps of {WANTED_TOKENS:,} that the question asks for**: "
            f"{settings['steps'] * tokens:,} tokens of training in all. What such a run does not "
            "show it does not rule out.",
            "",
        ]
    return [*lines, *_losses(group), *_paired(group), *_tables(group)]


def _what_the_control_gains(found: list[Answer]) -> list[str]:
    """Say so where the table helps and its codes need not be in order for it."""
    if found[3].sign >= 0 or found[0].sign < 0:
        return []
    return [
        "A trained table lowers the loss, and the control's does as well: what is shown is the use "
        "of a vector at every position, and none of uncertainty.",
        "",
    ]


def _claim(group: Runs, contrast: Contrast) -> Claim:
    seeds = sorted(group.get(OWN, {}))
    pairs = {seed: _pair(group, contrast, seed) for seed in seeds}
    kept = {seed: pair for seed, pair in pairs.items() if pair is not None}
    return Claim(
        contrast.words,
        {seed: _mean(*pair[0]) for seed, pair in kept.items()},
        {seed: _mean(*pair[1]) for seed, pair in kept.items()},
    )


Sums = tuple[list[float], list[int]]
"""Losses of each document in nats, and its predictions."""


def _pair(group: Runs, contrast: Contrast, seed: int) -> tuple[Sums, Sums] | None:
    """Return both sides of a contrast with a seed, or None where one is missing."""
    found: list[Sums] = []
    for arm, signal in (contrast.ours, contrast.others):
        runs = group.get(arm, {})
        # A model that is not trained is the same with every seed.
        untrained = arm == NONE and _settings(group)["table_alone"]
        run = next(iter(runs.values()), None) if untrained else runs.get(seed)
        if run is None:
            return None
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


def _losses(group: Runs) -> list[str]:
    lines = ["Nats per token; mean, least and most over seeds.", ""]
    lines += table_head(
        "| trained with | fed | held-out loss | loss in training, first and last tenth |"
    )
    for arm in (NONE, OWN, SHUFFLED):
        runs = list(group.get(arm, {}).values())
        for signal in runs[0]["losses"] if runs else ():
            loss = spread((_mean(run["losses"][signal], run["tokens"]) for run in runs), ".4f")
            ends = [[run["curve"][at] for run in runs if run["curve"]] for at in (0, -1)]
            curve = " → ".join(spread(end, ".3f") for end in ends) if ends[0] else "not trained"
            lines.append(f"| {arm} | {signal} | {loss} | {curve} |")
    return [*lines, ""]


def _paired(group: Runs) -> list[str]:
    seeds = sorted(group[OWN])
    lines = [
        "The same differences seed by seed, ± one standard error over documents, paired.",
        "",
        *table_head(f"| difference | {' | '.join(f'seed {seed}' for seed in seeds)} |"),
    ]
    for contrast in CONTRASTS:
        cells: list[str] = []
        for seed in seeds:
            pair = _pair(group, contrast, seed)
            cells.append("–" if pair is None else "{:+.4f} ± {:.4f}".format(*paired(*pair)))
        lines.append(f"| {contrast.words} | {' | '.join(cells)} |")
    return [*lines, ""]


def _tables(group: Runs) -> list[str]:
    runs = [run for arm in (OWN, SHUFFLED) for run in group.get(arm, {}).values()]
    shares = [run["entropy"] for run in group[OWN].values()]
    return [
        f"The tables have {runs[0]['table']['parameters']:,} parameters; at the end their root "
        f"mean square is {spread((run['table']['deviation'] for run in runs), '.4f')} (the "
        "model's embeddings of tokens: "
        f"{runs[0]['table']['deviation_of_tokens']:.4f}), and "
        f"{spread((run['table']['codes_seen'] for run in runs), ',.0f')} different codes were fed "
        "in training. The fed-back entropies of held-out text have a mean of "
        f"{spread((share['mean'] for share in shares), '.1%')} of the largest and a standard "
        f"deviation of {spread((share['sd'] for share in shares), '.1%')}.",
        "",
    ]


def _rates(tried: list[Run]) -> list[str]:
    """Return the short runs that the rate was chosen from."""
    if not tried:
        return [""]
    steps = {run["settings"]["steps"] for run in tried}
    return [
        "## The rate",
        "",
        "Chosen by the loss in training of short runs with the own signal and a seed of their own, "
        f"{several(steps)} steps; the control has the same.",
        "",
        *table_head("| rate | first tenth | last half |"),
        *(
            f"| {run['settings']['table_rate']} | {run['curve'][0]:.3f} | "
            f"{np.mean(run['curve'][-5:]):.4f} |"
            for run in tried
        ),
        "",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
