"""Sections on what trained models make of other signals, of more passes, and of levels."""

from __future__ import annotations

import statistics

from benchmarks.shared.over_seeds import Claim, lines_of, spread
from benchmarks.shared.pages import table_head
from benchmarks.uncertainty_feedback.arms import (
    Arms,
    Row,
    a_run,
    feedback_of,
    interval,
    loss,
    losses,
    seeds_of,
    short,
    signal_of,
)
from benchmarks.uncertainty_feedback.measure import LITERAL
from benchmarks.uncertainty_feedback.validation import (
    NEUTRAL,
    OWN,
    PLAIN,
    PREVIOUS,
    RECURSION,
    SHUFFLED,
    THIRD,
    ZERO,
)

# What an arm was trained with, and is judged by.
SIGNALS = (OWN, THIRD, NEUTRAL, ZERO, SHUFFLED)


def fed_others(arms: Arms) -> list[str]:
    """Return the section on other signals than the one trained with."""
    fed = {name: found for name, found in arms.items() if signal_of(a_run(found)) != PLAIN}
    if not fed:
        return []
    lines = [
        "## What a trained model makes of other signals",
        "",
        "The same windows and models, fed something else: nats per token more than with the codes "
        "of two passes, mean over seeds; least and most, or for one seed the 95 % interval over "
        "resampled documents. *zero*: nothing is added. *shuffled*: the codes of two passes, at "
        "other positions. A model that uses the signal loses by every one of them.",
        "",
        *table_head(f"| model | trained with | {' | '.join(SIGNALS[1:])} | seeds |"),
    ]
    for name, found in fed.items():
        cells = [
            interval([row["validation"]["all"]["differences"][signal] for row in found.values()])
            for signal in SIGNALS[1:]
        ]
        some = a_run(found)
        lines.append(
            f"| {some['backbone']} | {short(name)} | {' | '.join(cells)} | {seeds_of(found)} |"
        )
    lines.append("")
    for name, found in fed.items():
        if signal_of(a_run(found)) == OWN:
            lines.append(f"- {a_run(found)['backbone']}, {short(name)}: {_uses(found)}.")
    return [*lines, ""]


def _uses(found: dict[int, Row]) -> str:
    used = all(
        row["validation"]["all"]["differences"][signal]["low"] > 0
        for row in found.values()
        for signal in (ZERO, SHUFFLED, NEUTRAL)
    )
    where = "in the one seed there is" if len(found) == 1 else f"in all of {len(found)} seeds"
    if used:
        return f"it uses the signal: without it or shuffled, the loss is higher, {where}"
    return "that it uses the signal is not shown: some change of it does not raise the loss"


def recursion(arms: Arms) -> list[str]:
    """Return the section on passes beside the recursion token by token."""
    fed = {name: found for name, found in arms.items() if "codes" in a_run(found)["validation"]}
    if not fed:
        return []
    sample = a_run(next(iter(fed.values())))["validation"]["sample"]
    lines = [
        "## Passes and the true recursion",
        "",
        f"{sample['windows']} of the windows, also token by token, as in generation: nats per "
        "token more than so, mean over seeds; least and most, or for one seed the 95 % interval "
        "over resampled documents. Then the share of the codes of two passes that are those of the "
        "recursion, and their mean distance as a share of the largest entropy.",
        "",
        f"| model | trained with | token by token | {NEUTRAL} | {OWN} | {THIRD} | same codes | "
        "distance | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in fed.items():
        values = [row["validation"] for row in found.values()]
        cells = [spread((v["sample"]["losses"][RECURSION] for v in values), ".4f")]
        cells += [
            interval([v["sample"]["differences"][signal] for v in values])
            for signal in (NEUTRAL, OWN, THIRD)
        ]
        cells += [
            spread((v["codes"][OWN][key] for v in values), form)
            for key, form in (("same", ".1%"), ("distance", ".2%"))
        ]
        some = a_run(found)
        lines.append(
            f"| {some['backbone']} | {short(name)} | {' | '.join(cells)} | {seeds_of(found)} |"
        )
    return [*lines, ""]


def as_the_source_trains(arms: Arms) -> list[str]:
    """Return the section on the source's pseudo-code, which feeds the codes of another batch."""
    plain, rows = (arms.get(name, {}) for name in LITERAL)
    columns = ["seed", PLAIN, PREVIOUS, "difference", ZERO, NEUTRAL, OWN, "generating"]
    lines = [
        "## As the source's pseudo-code trains",
        "",
        "Read literally, the pseudo-code feeds a training batch the codes of the batch before it, "
        "which are of other texts, and in generation a token the code of the prediction before it. "
        "Arm *previous batch*: one row for each of 65,536 codes, drawn, one pass. Nats per token "
        "by what the trained model is fed; *generating* is the difference that feeding it its own "
        "codes token by token makes, on the sample of the section before. For this arm and "
        f"*{PLAIN}* here the corpus was built anew, with as many documents and tokens and another "
        "fingerprint: they are compared with each other, and not with the tables above.",
        "",
        *table_head(f"| {' | '.join(columns)} |"),
    ]
    for seed in sorted(plain.keys() & rows.keys()):
        fed, sample = (rows[seed]["validation"][part]["losses"] for part in ("all", "sample"))
        base = loss(plain[seed])
        rest = [f"{fed[signal]:.4f}" for signal in (ZERO, NEUTRAL, OWN)]
        cells = [f"{base:.4f}", f"{fed[PREVIOUS]:.4f}", f"{fed[PREVIOUS] - base:+.4f}", *rest]
        written = f"{sample[RECURSION] - sample[PREVIOUS]:+.4f}"
        lines.append(f"| {seed} | {' | '.join(cells)} | {written} |")
    words = "Lower loss with the codes of the previous batch than without feedback"
    claim = Claim(words, losses(arms, PREVIOUS), losses(arms, PLAIN))
    return [*lines, "", *lines_of([claim]), ""]


def levels_visited(arms: Arms) -> list[str]:
    """Return the section on how many levels and rows training visited."""
    own = {
        name: found
        for name, found in arms.items()
        if signal_of(a_run(found)) in (OWN, SHUFFLED) and a_run(found)["backbone"] == "LLaMA"
    }
    if not own:
        return []
    base = losses(arms, "no feedback")
    lines = [
        "## Levels, rows and which of them were visited",
        "",
        "*starts*: with a table drawn from N(0, initializer_range²), as large as the embeddings of "
        "tokens, or with zeros. *codes fed*: how many different ones a model got in training. "
        "*rows moved*: rows of the table that training changed. Means over seeds.",
        "",
        "| levels | rows | starts | signal | codes fed | rows moved | loss | below no feedback "
        "in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in own.values():
        some = a_run(found)
        settings, rows = feedback_of(some) or {}, some["table"]["rows"]
        levels = settings["levels"]
        shared = [seed for seed in found if seed in base]
        below = sum(loss(found[seed]) < base[seed] for seed in shared)
        fed, moved = (
            statistics.fmean(row["table"][key] for row in found.values())
            for key in ("codes_seen", "rows_moved")
        )
        signal = "shuffled" if signal_of(some) == SHUFFLED else "own"
        starts = "drawn" if settings.get("deviation") is None else "at zero"
        lines.append(
            f"| {levels:,} | {rows:,} | {starts} | {signal} | {fed:,.0f} ({fed / levels:.1%}) | "
            f"{moved:,.0f} ({moved / rows:.1%}) | {spread(map(loss, found.values()), '.4f')} | "
            f"{below} of {len(shared)} {'seed' if len(shared) == 1 else 'seeds'} |"
        )
    return [*lines, ""]
