"""The source's Tables 1 and 15 to 20 beside runs at a laptop's size, for ``prototype_mixer.md``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.prototype_mixer.source_tables import (
    ABLATIONS,
    CLAIMS,
    NAMES,
    SOURCE,
    SOURCE_WIDER,
    WIDER,
)
from benchmarks.prototype_mixer.tables import (
    CONTEXTS,
    DEV,
    DOCUMENTS,
    EPOCHS,
    POSITIONS,
    ROW,
    dev_ce,
)
from benchmarks.shared.over_seeds import spread

Row = dict[str, Any]
Rows = dict[str, list[Row]]
# The source's training text (§4), which its models read ten times.
SOURCE_TOKENS = 10 * 234.9e6
RATES = 3  # of a row that takes none of another's


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the runs of every row at its best rate, and functions over them."""
    tried = {part: all_runs(read(f"prototype_mixer/tables/{part}/*.json"))
             for part in ("contexts", "ablations")}  # fmt: skip
    contexts, ablations = (best_runs(rows) for rows in tried.values())
    longer: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in sorted(read("prototype_mixer/longer-*.json"), key=lambda row: row["model"]):
        longer[row["model"]][row["seed"]] = row
    every = [row for rows in (contexts, ablations) for found in rows.values() for row in found]
    return {
        "contexts": contexts,
        "context_runs": tried["contexts"],
        "ablations": ablations,
        "ablation_runs": tried["ablations"],
        "longer": longer,
        "environments": [row["environment"] for row in every],
        "tables": {
            title: [entry for entry in entries if entry[0] in ablations]
            for title, entries in ABLATIONS.items()
        },
        "context_claims": _context_claims(contexts),
        "ablation_claims": [
            (claim.said, verdict(ratios(ablations[claim.first], ablations[claim.second])))
            for claim in CLAIMS
            if ablations.keys() >= {claim.first, claim.second}
        ],
        "between_seeds": max(
            max(over) - min(over)
            for name, found in ablations.items()
            if name != found[0]["model"]
            and len(over := ratios(found, ablations.get(found[0]["model"], []))) > 1
        ),
        **_four_models(read),
        "names": NAMES,
        "titles": NAMES | WIDER,
        "theirs": SOURCE | SOURCE_WIDER,
        "lengths": CONTEXTS,
        "sizes": {
            "row": ROW,
            "step": POSITIONS,
            "documents": DOCUMENTS,
            "epochs": EPOCHS,
            "dev": DEV,
        },
        "perplexity": perplexity,
        "perplexities": lambda rows: map(perplexity, rows),
        "source_of": {t: {name: figure for name, _, figure in e} for t, e in ABLATIONS.items()},
        "ratios": ratios,
        "rates": _rates,
        "rate": _rate,
        "warmed_up": warmed_up,
        "over": lambda rows: over_llama(rows, longer["llama"]),
    }


def over_llama(rows: dict[int, Row], llama: dict[int, Row]) -> str:
    """Return perplexity over LLaMA's by the seeds that both have: mean, least and most."""
    both = sorted(rows.keys() & llama.keys())
    ratio = spread((rows[s]["perplexity"] / llama[s]["perplexity"] for s in both), ".3f")
    return f"{ratio} ({len(both)} seed{'s' * (len(both) > 1)})"


def _four_models(read: Callable[..., Any]) -> dict[str, Any]:
    """Return larger models trained for longer, by model and tokens, and ProtoT at other rates."""
    folder = "prototype_mixer/four_models"
    # Files of the rates that were tried first have the rate in their name.
    runs = [run for run in read(f"{folder}/*.json") if "curve" in run]
    runs += [run for steps in (1500, 3000) for run in read(f"{folder}/steps_{steps}/*.json")]
    longest: dict[int, dict[str, Row]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: run["steps"]):
        longest[run["steps"]]["mamba" if run["model"] == "mamba2" else run["model"]] = run
    return {
        "four": longest,
        "four_rates": read(f"{folder}/rates_3000/*.json"),
        "read_tokens": {
            steps: max(run["tokens"] for run in by.values()) for steps, by in longest.items()
        },
        "beyond_source": SOURCE_TOKENS / max(run["tokens"] for run in runs),
    }


def all_runs(found: Iterable[Row]) -> Rows:
    """Return every run of every row."""
    rows: Rows = defaultdict(list)
    for row in found:
        rows[row["row"]].append(row)
    return rows


def best_runs(every: Rows) -> Rows:
    """Return the runs of every row at the rate that was best with seed 0, by the row's name.

    A row is left out as long as it has not been run at several rates, since the best is not known
    then: at ``RATES``, or at two where these are the best of another row and its half.
    """
    chosen: Rows = {}
    for name, rows in every.items():
        tried = [row for row in rows if row["seed"] == 0]
        if len(tried) >= (RATES if rows[0].get("rate_of", name) == name else 2):
            best = min(tried, key=dev_ce)["rate"]
            chosen[name] = [row for row in rows if row["rate"] == best]
    return chosen


def perplexity(row: Row) -> float:
    """Return the least perplexity on the way or at the end."""
    return math.exp(dev_ce(row))


def ratios(rows: list[Row], others: list[Row]) -> list[float]:
    """Return perplexities over those of others with the same seeds."""
    of_seed = {row["seed"]: perplexity(row) for row in others}
    return [perplexity(row) / of_seed[row["seed"]] for row in rows if row["seed"] in of_seed]


def verdict(found: list[float]) -> str:
    """Say whether ratios are all below 1, as a claim has it; one seed shows nothing yet."""
    if not found:
        return "not run"
    if len(found) == 1:
        way = "that way" if found[0] < 1 else "the other way"
        return f"points {way}, one seed: {found[0]:.3f}"
    said = "shown" if max(found) < 1 else "the opposite" if min(found) > 1 else "not shown"
    return f"**{said}**: {spread(found, '.3f')}, {len(found)} seeds"


def warmed_up(rows: Rows) -> str:
    """Return over how many of their steps the rate of runs rises, as their recipes say."""
    warmups = {row["settings"]["optimizer"]["warmup"] for found in rows.values() for row in found}
    return " or ".join(f"{share:.0%}" for share in sorted(warmups))


def _rates(rows: list[Row], *, first: bool) -> str:
    of_rate = {row["rate"]: row for row in rows if row["seed"] == 0}
    if not of_rate:
        return "–"
    best = min(of_rate, key=lambda rate: dev_ce(of_rate[rate]))
    cells = [
        f"{'**' * (rate == best)}{rate:g}: {perplexity(row):.1f}{'**' * (rate == best)}"
        for rate, row in sorted(of_rate.items())
    ]
    edges = {min(of_rate), max(of_rate)} if first else {min(of_rate)}
    return f"{', '.join(cells)}{'; at the edge' * (best in edges)}"


def _rate(chosen: float, rows: list[Row]) -> str:
    tried = [row["rate"] for row in rows if row["seed"] == 0]
    return f"{chosen:g}{', at the edge' * (chosen in (min(tried), max(tried)))}"


def _context_claims(rows: Rows) -> list[tuple[str, str]]:
    short, long, last = CONTEXTS[0], CONTEXTS[-2], CONTEXTS[-1]

    def behind(length: int) -> dict[int, float]:
        llama = {row["seed"]: perplexity(row) for row in rows[f"llama-at-{length}"]}
        own = rows[f"protot-at-{length}"]
        return {r["seed"]: perplexity(r) / llama[r["seed"]] for r in own if r["seed"] in llama}

    at_short, at_last = behind(short), behind(last)
    growth = [at_short[seed] / at_last[seed] for seed in at_short.keys() & at_last.keys()]
    found = [
        (
            f"ProtoT falls behind LLaMA as contexts grow (its ratio at {short:,} over that at "
            f"{last:,} is below 1; the source: 0.893)",
            verdict(growth),
        )
    ]
    for name in ("protot", *WIDER):
        theirs = (SOURCE | SOURCE_WIDER)[name][2:]
        # What the source has as the better of the two, over the other.
        better, other = (last, long) if theirs[1] < theirs[0] else (long, last)
        both = (rows.get(f"{name}-at-{length}", []) for length in (better, other))
        said = (
            f"{(NAMES | WIDER)[name]}, {better:,} tokens are better than {other:,} (the source: "
            f"{min(theirs) / max(theirs):.3f})"
        )
        found.append((said, verdict(ratios(*both))))
    return found
