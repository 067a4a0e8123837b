"""Runs of uncertainty feedback by arm and seed, claims about them, checks and costs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.shared.over_seeds import Claim, answers, lines_of, spread
from benchmarks.shared.pages import ranged
from benchmarks.uncertainty_feedback.checks import FED
from benchmarks.uncertainty_feedback.measure import LITERAL, SWEEP, TRAIN
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

Row = dict[str, Any]
Arms = dict[str, dict[int, Row]]
GOAL, SIGNIFICANT = 0.01, 0.05
# Without feedback, with it, with the shuffled signal.
TRIPLES = {
    "65,536 rows": ("no feedback", "two passes", "shuffled"),
    "65,536 levels interpolated between 64 rows": (
        "no feedback",
        "65,536 levels, interpolated",
        "interpolated, shuffled",
    ),
    "the same with a table that starts at zero": (
        "no feedback",
        "interpolated, from zero",
        "interpolated, from zero, shuffled",
    ),
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what the page's tables show."""
    runs = read("uncertainty_feedback/*.json")
    literal = read("uncertainty_literal/*.json")
    checks = read("uncertainty_checks/*.json")
    arms, previous = by_arm(runs), by_arm(literal)
    timings = {
        "CPU": read("uncertainty_overhead.json"),
        "GPU": read("uncertainty_overhead_cuda.json"),
    }
    helped = helps(arms)
    words = "Lower loss with the codes of the previous batch than without feedback"
    return {
        "arms": arms,
        "first": next(iter(arms["no feedback"].values())),
        "helps": helped,
        "lowers": any(said.startswith("**it lowers") for _, said, _ in helped),
        "table": [_trained(name, found, arms["no feedback"]) for name, found in arms.items()],
        "signals": (THIRD, NEUTRAL, ZERO, SHUFFLED),
        "fed": {n: found for n, found in arms.items() if signal_of(a_run(found)) != PLAIN},
        "own": {n: found for n, found in arms.items() if signal_of(a_run(found)) == OWN},
        "visited": [
            _visited(found, losses(arms["no feedback"]))
            for found in arms.values()
            if signal_of(a_run(found)) in (OWN, SHUFFLED)
        ],
        "uses": _uses,
        "more": _more,
        "codes": _codes,
        "recursion": RECURSION,
        "passes": (NEUTRAL, OWN, THIRD),
        "literal": _literal(*(previous[name] for name in LITERAL)),
        "literal_claim": lines_of(
            [Claim(words, *map(losses, (previous[PREVIOUS], previous[PLAIN])))]
        ),
        "environments": [row["environment"] for row in [*runs, *literal]],
        "checks": checks,
        "answers": [
            (title, arm, [answer(row["report"]) for row in checks if row["arm"] == arm])
            for title, answer in ANSWERS.items()
            for arm in FED
            if any(row["arm"] == arm for row in checks)
        ],
        "timings": timings,
        "parts": _parts,
        "judged": judged,
        "mib": lambda found: sum(found.values()) / 2**20,
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


def helps(arms: Arms) -> list[tuple[str, str, list[str]]]:
    """Return for each form whether feedback lowers the loss below both others, and by what."""
    triples = [[losses(arms[name]) for name in names] for names in TRIPLES.values()]
    # In one call: they are corrected for how many there are.
    compared = answers(
        [
            claim
            for plain, fed, control in triples
            for claim in (
                Claim("Lower loss with two passes than without feedback", fed, plain),
                Claim("Lower loss than with the shuffled signal", fed, control),
            )
        ]
    )
    found: list[tuple[str, str, list[str]]] = []
    for at, (words, (plain, fed, control)) in enumerate(zip(TRIPLES, triples, strict=True)):
        pair = compared[2 * at : 2 * at + 2]
        said = verdict(fed, plain, control, [answer.sign for answer in pair])
        found.append((words, said, [answer.line for answer in pair]))
    return found


def verdict(
    fed: dict[int, float], plain: dict[int, float], control: dict[int, float], signs: Iterable[int]
) -> str:
    """Return whether feedback lowers the loss below both, in every seed that all three have.

    Args:
        fed: the loss by seed, with feedback.
        plain: the same without.
        control: the same with a shuffled signal.
        signs: those of :class:`Answer`, of the comparisons with either.
    """
    seeds = sorted(set(fed) & set(plain) & set(control))
    below = [sum(fed[seed] < other[seed] for seed in seeds) for other in (plain, control)]
    if not seeds or min(below) < len(seeds):
        return (
            f"**it does not work here**: below no feedback in {below[0]} and below the shuffled "
            f"signal in {below[1]} of {len(seeds)} seeds"
        )
    low = f"below both no feedback and the shuffled signal, in all of {len(seeds)} seeds"
    if all(sign < 0 for sign in signs):
        return f"**it lowers the loss**, {low}"
    return f"that it lowers the loss is not shown: it is {low}, which may be noise"


def _trained(name: str, found: dict[int, Row], base: dict[int, Row]) -> list[str]:
    some = a_run(found)
    both = [seed for seed in found if seed in base]
    apart = [loss(found[seed]) - loss(base[seed]) for seed in both]
    # A run that was cut short knows the time of its last part alone.
    whole = [s for s in both if not (found[s]["resumed"] or base[s]["resumed"])]
    times = [found[s]["processor_seconds"] / base[s]["processor_seconds"] for s in whole]
    return [
        name,
        spread(map(loss, found.values()), ".4f"),
        "" if signal_of(some) == PLAIN else spread(apart, "+.4f"),
        str(len(found)),
        f"{some['table']['parameters'] if 'table' in some else 0:,}",
        spread(times, ".2f"),
    ]


def _uses(found: dict[int, Row]) -> bool:
    """Return whether the loss is higher without the signal or with another, in every seed."""
    return all(
        row["validation"]["all"]["differences"][signal]["low"] > 0
        for row in found.values()
        for signal in (ZERO, SHUFFLED, NEUTRAL)
    )


def _more(found: dict[int, Row], signal: str, of: str) -> str:
    """Return what a signal costs: over seeds, or with the interval of the only one."""
    each = [row["validation"][of]["differences"][signal] for row in found.values()]
    if len(each) == 1:
        return ranged(each[0], "mean", "+.4f")
    return spread((one["mean"] for one in each), "+.4f")


def _codes(found: dict[int, Row], key: str, form: str) -> str:
    return spread((row["validation"]["codes"][OWN][key] for row in found.values()), form)


def _visited(found: dict[int, Row], base: dict[int, float]) -> list[str]:
    some = a_run(found)
    settings, rows = feedback_of(some) or {}, some["table"]["rows"]
    levels = settings["levels"]
    fed, moved = (
        statistics.fmean(row["table"][key] for row in found.values())
        for key in ("codes_seen", "rows_moved")
    )
    shared = [seed for seed in found if seed in base]
    return [
        f"{levels:,}",
        f"{rows:,}",
        "drawn" if settings.get("deviation") is None else "at zero",
        "shuffled" if signal_of(some) == SHUFFLED else "own",
        f"{fed:,.0f} ({fed / levels:.1%})",
        f"{moved:,.0f} ({moved / rows:.1%})",
        f"{sum(loss(found[seed]) < base[seed] for seed in shared)} of {len(shared)} seeds",
    ]


def _literal(plain: dict[int, Row], rows: dict[int, Row]) -> list[list[str]]:
    lines: list[list[str]] = []
    for seed in sorted(plain.keys() & rows.keys()):
        fed, sample = (rows[seed]["validation"][part]["losses"] for part in ("all", "sample"))
        base = loss(plain[seed])
        cells = [f"{base:.4f}", f"{fed[PREVIOUS]:.4f}", f"{fed[PREVIOUS] - base:+.4f}"]
        cells += [f"{fed[signal]:.4f}" for signal in (ZERO, NEUTRAL, OWN)]
        lines.append([str(seed), *cells, f"{sample[RECURSION] - sample[PREVIOUS]:+.4f}"])
    return lines


def _interval(found: Row | None, form: str = "+.4f") -> str:
    if found is None or found["value"] is None:
        return "nothing to compare"
    return ranged(found, "value", form)


def _above(found: Row | None) -> bool:
    return found is not None and found["low"] is not None and found["low"] > 0


def _below(found: Row | None) -> bool:
    return found is not None and found["high"] is not None and found["high"] < 0


def _ablation(report: Row) -> tuple[bool, str]:
    conditions = {one["signal"]: one for one in report["ablation"]["rows"]}
    change = conditions["shuffled"]["change"]
    return _above(change), _interval(change)


def _attention(report: Row) -> tuple[bool, str]:
    if report["attention"] is None:
        return False, f"not done: {report['left_out']['attention']}"
    layers = report["attention"]["rows"]
    later = layers[len(layers) // 2 :]
    best = max(later, key=lambda one: one["correlation"])
    more = (one for one in later if one["correlation"] > 0 and one["q"] <= SIGNIFICANT)
    return any(_above(one["added"]) for one in more), (
        f"ρ {best['correlation']:+.3f} in layer {best['layer']}, {_interval(best['added'], '+.3f')}"
    )


def _hedging(report: Row) -> tuple[bool, str]:
    own, none, shuffled = report["hedging"]["rows"]
    both = _above(none.get("own_less")) and _above(shuffled.get("own_less"))
    return both, f"{_interval(none.get('own_less'))}, {own['hedges'] + none['hedges']} words"


def _recovery(report: Row) -> tuple[bool, str]:
    _, zero, shuffled = (row.get("own_loss_less") for row in report["mistakes"]["rows"])
    return _below(zero) and _below(shuffled), _interval(shuffled, "+.3f")


def _probe(report: Row) -> tuple[bool, str]:
    layers = [one for one in report["probe"]["rows"] if one["code"]["value"] is not None]
    if not layers:
        return False, "nothing to compare"
    best = max(layers, key=lambda one: one["code"]["value"])
    read = f"R² {best['code']['value']:.3f} at depth {best['depth']:.2f}"
    return _above(best["added"]) and _above(best["code"]), (
        f"{read}, {_interval(best['added'], '+.3f')}"
    )


ANSWERS = {
    "ablation": _ablation,
    "attention": _attention,
    "hedging": _hedging,
    "recovery": _recovery,
    "probe": _probe,
}


def _parts(shape: Row) -> dict[str, str]:
    """Return what the timed parts are called."""
    small, large = (shape[name] * shape["length"] for name in ("batch", "large_batch"))
    return {
        "decode": "decoding",
        "prefill": "prefill",
        "step": f"training step of {small:,} tokens",
        "large step": f"training step of {large:,} tokens{', again' * (small == large)}",
    }


def judged(result: Row) -> list[str]:
    """Return whether decoding and one pass of training cost less than the goal, as measured."""
    timed, shape = result["timed"], result["shape"]
    tokens = {"step": shape["batch"], "large step": shape["large_batch"]}
    lines: list[str] = []
    for part in ("decode", "step", "large step"):
        more = {key: value - 1 for key, value in timed[part]["one pass"]["processor"].items()}
        settled = not more["low"] < GOAL <= more["high"]
        words = "Decoding" if part == "decode" else f"One pass in a {_parts(shape)[part]}"
        line = (
            f"{words} takes {more['ratio']:+.1%} of processor time ({more['low']:+.1%} to "
            f"{more['high']:+.1%}); goal of under {GOAL:.0%}: "
        )
        alone = timed[part].get("what one pass adds, alone", {}).get("processor")
        if settled or alone is None:
            line += f"{_reached(more['ratio'])}{'' if settled else ', by the median alone'}."
        else:
            # To two digits.
            long = float(f"{alone['ratio'] / GOAL * tokens[part] * shape['length']:.2g}")
            line += (
                f"not settled so. What it adds takes {ranged(alone, 'ratio', '.2%')} of such a "
                f"step, timed alone: {_reached(alone['ratio'])}. It would be {GOAL:.0%} of a step "
                f"of {long:,.0f} tokens."
            )
        lines.append(line)
    return lines


def _reached(more: float) -> str:
    return f"**{'reached' if more < GOAL else 'missed'}**"
