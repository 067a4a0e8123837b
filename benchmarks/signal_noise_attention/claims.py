"""What the instruments answer to the claims of Prism. Imported by the renderer."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from benchmarks.shared.over_seeds import HOW, LEVEL, Claim, Figures, lines_of, spread
from benchmarks.shared.pages import runs_made, several, table_head
from benchmarks.signal_noise_attention.claims_roles import roles_of
from benchmarks.signal_noise_attention.claims_spectra import length, rates, resonance
from benchmarks.signal_noise_attention.figures import DEFAULT, OTHERS

MEASURES = {
    "distance": "mean distance, positions",
    "distance_beyond_self": "the same, without self",
    "near_share": "share on 1 to 4 back",
    "entropy": "entropy, nats",
    "self_share": "share on self",
    "first_share": "share on the first token",
}
REACH = "distance_beyond_self"
LIKE_UNIFORM = 0.02
"""How near to uniform attention's a figure is called the same."""
SOURCE_TOKENS = 20_000 * 32 * 512
Row = dict[str, Any]


def claims(readings: list[Row], runs: list[Row] | None = None) -> list[str]:
    """Return a section for each claim, with its controls, from the readings of all models.

    Args:
        readings: of trained models.
        runs: of their training, which say how long it was.
    """
    if not readings:
        return []
    models: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(readings, key=lambda row: (row["variant"] != DEFAULT, row["seed"])):
        models[row["variant"]].append(row)
    return [
        *_scope(runs or []),
        *_corpora(models),
        *_reach(models),
        *_sink(models),
        *roles_of(models),
        *rates(models),
        *resonance(models),
        *length(models),
        *_gradients(models),
        runs_made([row["environment"] for row in readings]),
        "",
    ]


def _scope(runs: list[Row]) -> list[str]:
    if not runs:
        return [HOW, ""]
    steps = sorted({row["settings"]["steps"] for row in runs})
    most = max(row["settings"]["steps"] * row["settings"]["batch_size"]
               * row["settings"]["data"]["length"] for row in runs)  # fmt: skip
    share = most / SOURCE_TOKENS
    return [
        "## How far what follows goes",
        "",
        f"These models were trained for {' or '.join(f'{count:,}' for count in steps)} steps, at "
        f"most {most:,} tokens: {share:.2%} of the source's {SOURCE_TOKENS:,}. What heads look at, "
        "rates and lengths are of models that have hardly begun to learn; a claim that is not "
        "shown here may show later, and one that is may go.",
        "",
    ]


def _corpora(models: dict[str, list[Row]]) -> list[str]:
    """Return which models read another corpus than most, or nothing."""
    read: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, rows in models.items():
        for row in rows:
            read[row["corpus"]["fingerprint"]][name].append(row["seed"])
    most = max(read, key=lambda one: sum(map(len, read[one].values())))
    return [
        line
        for fingerprint, seeds in read.items()
        if fingerprint != most
        for name, each in seeds.items()
        for line in (
            f"{name}, {'seed' if len(each) == 1 else 'seeds'} {several(each)}: trained and read "
            "again by later code on the corpus built again, with as many documents and tokens. Its "
            f"fingerprint ({fingerprint}; all other models: {most}) and the loss are others: what "
            "follows compares across the two.",
            "",
        )
    ]


def verdict(effects: list[float], ps: list[float], expected: int) -> str:
    """Return whether a claim shows in every model: sign as expected, and p below the level.

    p is over the heads of one model, so each seed has to pass by itself; bold takes two.
    """
    if not all(p < LEVEL for p in ps):
        return "not shown"
    if all(effect * expected > 0 for effect in effects):
        answer = "yes"
    elif all(effect * expected < 0 for effect in effects):
        answer = "no: the opposite"
    else:
        return "not shown"
    if len(effects) > 1:
        return f"**{answer}, in every seed**"
    return f"{answer}, in the one seed there is"


def _compared(row: Row, measure: str) -> Row:
    return next(c for c in row["heads"]["comparison"] if c["measure"] == measure)


def _reach(models: dict[str, list[Row]]) -> list[str]:
    own = {name: rows for name, rows in models.items() if rows[0]["heads"]["comparison"]}
    if not own:
        return []
    lines = [
        "## Do signal heads reach further than noise heads?",
        "",
        "Medians over heads of a model, then mean over seeds. δ is Cliff's: the share of pairs of "
        "heads of one layer in which the signal head has more, less the share of the opposite; one "
        "number for each seed. p is of both sides, under exchange of labels within layers, and "
        "speaks of these heads; a claim about models needs its sign in every seed. With ratio 1 "
        "both groups are rotated alike: what differs there is λ's sign and size alone. "
        "*uniform*: attention alike to all that is seen.",
        "",
        f"| model | measure | signal | noise | uniform | δ by seed | p by seed | below {LEVEL:g} "
        "with one sign |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in own.items():
        for measure, words in MEASURES.items():
            if measure != REACH and name != DEFAULT:
                continue
            found = [_compared(row, measure) for row in rows]
            effects, ps = ([c[key] for c in found] for key in ("effect", "p"))
            signal, noise = (
                statistics.fmean(c[f"{group}_median"] for c in found)
                for group in ("signal", "noise")
            )
            alike = len({effect > 0 for effect in effects}) == 1 and all(p < LEVEL for p in ps)
            shown = [" ".join(f"{v:+.2f}" for v in effects), " ".join(f"{p:.2g}" for p in ps)]
            lines.append(
                f"| {name} | {words} | {signal:.3g} | {noise:.3g} | "
                f"{rows[0]['heads']['uses']['uniform'][measure]:.3g} | {shown[0]} | {shown[1]} | "
                f"{'yes' if alike else 'no'} |"
            )
    lines.append("")
    if DEFAULT in own:
        lines += _reach_answers(own)
    return [*lines, ""]


def _reach_answers(own: dict[str, list[Row]]) -> list[str]:
    rows = own[DEFAULT]
    default = [_compared(row, REACH) for row in rows]
    answer = verdict([c["effect"] for c in default], [c["p"] for c in default], 1)
    choosing = {
        group: statistics.fmean(_over_heads(row, "relative_entropy", group) for row in rows)
        for group in ("signal", "noise")
    }
    gaps = {
        name: {
            row["seed"]: _compared(row, REACH)["signal_median"]
            - _compared(row, REACH)["noise_median"]
            for row in found
        }
        for name, found in own.items()
    }
    apart = max(
        abs(_compared(row, REACH)["signal_median"] / row["heads"]["uses"]["uniform"][REACH] - 1)
        for row in rows
    )
    said = "signal heads reach further than noise heads"
    if apart < LIKE_UNIFORM and choosing["signal"] > 1 - LIKE_UNIFORM:
        said = "noise heads look nearer than signal heads, which attend everywhere alike"
    lines = [
        f"- With {DEFAULT}, {said}: {answer}. That alone does not speak for π:",
        *lines_of(
            [
                Claim(
                    f"The gap between the groups is narrower with {other} than with {DEFAULT}",
                    gaps[other],
                    gaps[DEFAULT],
                )
                for other in ("ratio 1", "ratio 2")
                if other in gaps
            ]
        ),
        "- Reaching far may be not choosing: entropy over that of uniform attention, mean over "
        f"heads, is {choosing['signal']:.3f} in signal and {choosing['noise']:.3f} in noise "
        "heads.",
    ]
    if apart < LIKE_UNIFORM and choosing["signal"] > 1 - LIKE_UNIFORM:
        lines.append(
            "- By reach and entropy signal heads are near uniform attention: their median reach is "
            f"within {apart:.1%} of its, and their entropy {choosing['signal']:.1%} of its. Their "
            "reach says nothing of what they look for."
        )
    return lines


def _over_heads(row: Row, measure: str, group: str | None = None) -> float:
    heads = [h for h in row["heads"]["uses"]["heads"] if group in (None, h["group"])]
    return statistics.fmean(h[measure] for h in heads)


def _own_group(row: Row) -> list[Row]:
    """Return the heads that a claim is of: signal heads, or all where they are of one kind.

    What noise heads look at counts λ times as much: their shares are small figures of little.
    """
    heads = row["heads"]["uses"]["heads"]
    return [head for head in heads if head["group"] == "signal"] or heads


def _first_beyond_self(figures: Row) -> float:
    """Return the share of the first token among the attention that is not on the token itself."""
    return figures["first_share"] / (1 - figures["self_share"])


def _sink(models: dict[str, list[Row]]) -> list[str]:
    lines = [
        "## Is the attention sink smaller?",
        "",
        "The share of the first token of a window among the attention that is not on the token "
        "itself: mean over signal heads, or over all heads where they are of one kind, and over "
        "seeds, least and most; then of the greatest of these heads; then of uniform attention. "
        "Noise heads are shown beside and not counted: they put much on the token itself, and λ "
        "makes little of what they look at.",
        "",
        "| model | signal heads | greatest head | uniform | noise heads | signal heads: self | "
        "noise heads: self | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    shares: dict[str, Figures] = {}
    sinks: list[str] = []
    for name, rows in models.items():
        own = [_own_group(row) for row in rows]
        noise = [[h for h in r["heads"]["uses"]["heads"] if h["group"] == "noise"] for r in rows]
        uniform = [_first_beyond_self(row["heads"]["uses"]["uniform"]) for row in rows]
        means = [statistics.fmean(map(_first_beyond_self, heads)) for heads in own]
        shares[name] = {row["seed"]: mean for row, mean in zip(rows, means, strict=True)}
        if any(mean > even for mean, even in zip(means, uniform, strict=True)):
            sinks.append(name)
        cells = [
            spread(means),
            f"{max(_first_beyond_self(head) for heads in own for head in heads):.3g}",
            spread(uniform),
            spread(statistics.fmean(map(_first_beyond_self, h)) for h in noise if h),
            *(
                spread(statistics.fmean(h["self_share"] for h in heads) for heads in group if heads)
                for group in (own, noise)
            ),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {len(rows)} |")
    lines.append("")
    if not sinks:
        return [
            *lines,
            "- No model here has a sink: the mean share of the first token is at or below that of "
            "uniform attention in all of them and in every seed. So that π makes a sink smaller "
            "cannot be told.",
            "",
        ]
    lines += [
        f"- Above uniform attention, in some seed: {', '.join(sinks)}.",
        *lines_of(
            [
                Claim(f"Smaller with {DEFAULT} than with {other}", shares[DEFAULT], shares[other])
                for other in OTHERS
                if DEFAULT in shares and other in shares
            ]
        ),
    ]
    return [*lines, ""]


def _gradients(models: dict[str, list[Row]]) -> list[str]:
    lines = [
        "## Gradient norms",
        "",
        "Before clipping, in the last quarter of training: mean over the steps that the history "
        "has a line of, then over seeds; and the greatest of these. A line has the norm of its own "
        "step alone, every tenth by default: a greater one between two lines is not seen.",
        "",
        *table_head("| model | mean | greatest |"),
    ]
    for name, rows in models.items():
        greatest = max(row["gradient"]["greatest"] for row in rows)
        mean = spread(row["gradient"]["mean"] for row in rows)
        lines.append(f"| {name} | {mean} | {greatest:.3g} |")
    return [*lines, ""]
