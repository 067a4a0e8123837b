"""The sections of docs/results/prototype_mixer.md on the source's Tables 1 and 15 to 20."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
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
from benchmarks.shared.pages import runs_made, table_head
from prismlm.files import read_json

Row = dict[str, Any]
Rows = dict[str, list[Row]]
ROWS = NAMES | WIDER
RATES = 3  # of a row that takes none of another's


def sections(folder: Path) -> list[str]:
    """Return the lines of both sections, of the runs that are there."""
    contexts = best_runs(folder / "contexts")
    ablations = best_runs(folder / "ablations")
    environments = [
        row["environment"]
        for rows in (contexts, ablations)
        for found in rows.values()
        for row in found
    ]
    lines = _table_1(contexts, all_runs(folder / "contexts")) if contexts else []
    lines += _ablated(ablations, all_runs(folder / "ablations")) if ablations else []
    return [*lines, runs_made(environments), ""] if lines else []


def best_runs(folder: Path) -> Rows:
    """Return the runs of every row at the rate that was best with seed 0, by the row's name.

    A row is left out as long as it has not been run at several rates, since the best is not known
    then: at ``RATES``, or at two where these are the best of another row and its half.
    """
    chosen: Rows = {}
    for name, rows in all_runs(folder).items():
        tried = [row for row in rows if row["seed"] == 0]
        if len(tried) >= (RATES if rows[0].get("rate_of", name) == name else 2):
            best = min(tried, key=dev_ce)["rate"]
            chosen[name] = [row for row in rows if row["rate"] == best]
    return chosen


def all_runs(folder: Path) -> Rows:
    """Return every run of every row."""
    found: Rows = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        row = read_json(path)
        found[row["row"]].append(row)
    return found


def counted(seeds: int) -> str:
    """Return a number of seeds as text."""
    return "one seed" if seeds == 1 else f"{seeds} seeds"


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
    said = "not shown"
    if max(found) < 1:
        said = "shown"
    elif min(found) > 1:
        said = "the opposite"
    return f"**{said}**: {spread(found, '.3f')}, {counted(len(found))}"


def spread(found: list[float], form: str) -> str:
    """Return the mean as text, with least and most of several."""
    middle = format(statistics.mean(found), form)
    if len(found) == 1:
        return middle
    return f"{middle} ({min(found):{form}} to {max(found):{form}})"


def warmed_up(rows: Iterable[Row]) -> str:
    """Return over how many of their steps the rate of runs rises, as their recipes say."""
    shares = sorted({row["settings"]["optimizer"]["warmup"] for row in rows})
    return f"the rate rising over {' or '.join(f'{share:.0%}' for share in shares)} of the steps"


def _every(rows: Rows) -> list[Row]:
    return [row for found in rows.values() for row in found]


def _table_1(rows: Rows, tried: Rows) -> list[str]:
    first = next(iter(rows.values()))[0]
    lines = [
        "## Table 1: contexts, and what of ProtoT grows with them",
        "",
        f"Every training document has {ROW:,} tokens, so that at each context all positions are "
        f"text, no row has two documents, and all models read the same {first['tokens'] / 1e6:.2f} "
        f"M tokens once, in {first['settings']['steps']:,} steps, {warmed_up(_every(rows))}. "
        "Perplexity of the same held-out text, at the best of the rates below by that perplexity "
        "with seed 0, so that what is best "
        f"is a little too good. A step has pieces of {POSITIONS // CONTEXTS[0]} documents at "
        f"{CONTEXTS[0]}, and one document at {CONTEXTS[-1]:,}: read the table by columns, since "
        "along a row that changes too.",
        "",
        *_in_words(rows),
        *_commands("contexts"),
        *table_head(f"| | parameters | {' | '.join(f'{length:,}' for length in CONTEXTS)} |"),
    ]
    for name in ROWS:
        found = [rows.get(f"{name}-at-{length}", []) for length in CONTEXTS]
        size = next((f"{some[0]['parameters']:,}" for some in found if some), "–")
        cells = " | ".join(spread([*map(perplexity, r)], ".1f") if r else "–" for r in found)
        lines.append(f"| {ROWS[name]} | {size} | {cells} |")
    missing = [
        f"{ROWS[name]} at {length:,}"
        for name in ROWS
        for length in CONTEXTS
        if f"{name}-at-{length}" not in rows
    ]
    lines += ["", f"Not run yet at the best rate: {', '.join(missing)}."] if missing else []
    lines += [
        "",
        "Over LLaMA's of the same context and seed; in brackets the source's.",
        "",
        *table_head(f"| | {' | '.join(f'{length:,}' for length in CONTEXTS)} |"),
    ]
    for name, theirs in (SOURCE | SOURCE_WIDER).items():
        if name != "llama":
            cells = [
                _ratio(rows, f"{name}-at-{length}", f"llama-at-{length}", theirs[k] / llama)
                for k, (length, llama) in enumerate(zip(CONTEXTS, SOURCE["llama"], strict=True))
            ]
            lines.append(f"| {ROWS[name]} | {' | '.join(cells)} |")
    return [*lines, "", *_rates_tried(tried), *_context_claims(rows), ""]


def _in_words(rows: Rows) -> list[str]:
    said: list[str] = []
    for length, protot, llama in zip(CONTEXTS, SOURCE["protot"], SOURCE["llama"], strict=True):
        found = ratios(rows.get(f"protot-at-{length}", []), rows.get(f"llama-at-{length}", []))
        if found and length in (CONTEXTS[0], CONTEXTS[-1]):
            said.append(f"{spread(found, '.2f')} at {length:,} (the source: {protot / llama:.2f})")
    if not said:
        return []
    return [
        f"**ProtoT's perplexity over LLaMA's: {', '.join(said)}.** The source trains longer.",
        "",
    ]


def _rates_tried(tried: Rows) -> list[str]:
    lines = [
        "Perplexity with seed 0 at every rate that was tried, the best in bold. Longer contexts "
        f"than {CONTEXTS[0]} have two, the one that was best there among them. At the edge means "
        "that a rate beyond was not tried; for longer contexts, a lower one.",
        "",
        *table_head(f"| | {' | '.join(f'{length:,}' for length in CONTEXTS)} |"),
    ]
    for name, title in ROWS.items():
        found = [tried.get(f"{name}-at-{length}", []) for length in CONTEXTS]
        cells = [_rates(rows, first=rows is found[0]) for rows in found]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return [*lines, ""]


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


def _commands(part: str) -> list[str]:
    command = "    python -m benchmarks.prototype_mixer.tables corpus-rows"
    return [
        f"From `prototype_mixer/tables/{part}/`, which these write:",
        "",
        f"{command} corpus --texts DIR",
        f"{command} {part}",
        "",
    ]


def _ratio(rows: Rows, name: str, other: str, source: float) -> str:
    found = ratios(rows.get(name, []), rows.get(other, []))
    return f"{spread(found, '.3f') if found else '–'} ({source:.3f})"


def _context_claims(rows: Rows) -> list[str]:
    short, long, last = CONTEXTS[0], CONTEXTS[-2], CONTEXTS[-1]

    def behind(length: int) -> dict[int, float]:
        llama = {row["seed"]: perplexity(row) for row in rows.get(f"llama-at-{length}", [])}
        own = rows.get(f"protot-at-{length}", [])
        return {r["seed"]: perplexity(r) / llama[r["seed"]] for r in own if r["seed"] in llama}

    at_short, at_last = behind(short), behind(last)
    growth = [at_short[seed] / at_last[seed] for seed in at_short.keys() & at_last.keys()]
    lines = [
        "What the source's figures say along rows, where here the documents of a step change too:",
        "",
        f"- ProtoT falls behind LLaMA as contexts grow (its ratio at {short:,} over that at "
        f"{last:,} is below 1; the source: 0.893): {verdict(growth)}",
    ]
    for name in ("protot", *WIDER):
        theirs = (SOURCE | SOURCE_WIDER)[name][2:]
        # What the source has as the better of the two, over the other.
        better, other = (last, long) if theirs[1] < theirs[0] else (long, last)
        found = ratios(rows.get(f"{name}-at-{better}", []), rows.get(f"{name}-at-{other}", []))
        lines.append(
            f"- {ROWS[name]}, {better:,} tokens are better than {other:,} (the source: "
            f"{min(theirs) / max(theirs):.3f}): {verdict(found)}"
        )
    return lines


def _ablated(rows: Rows, tried: Rows) -> list[str]:
    first = next(iter(rows.values()))[0]
    lines = [
        "## Tables 15 to 20: ablations, each at its best rate",
        "",
        f"{DOCUMENTS} documents of {ROW:,} tokens, read {EPOCHS} times in rows of 256, "
        f"{first['settings']['steps']:,} steps, {warmed_up(_every(rows))}; the least "
        f"perplexity of {DEV:,} held-out tokens after any of the passes, as in the source. The "
        "rate of every row is the best of three to "
        "five with seed 0, each twice the one before; at the edge means that a rate beyond was not "
        "tried. A seed also draws which held-out tokens are read, so that perplexities of two "
        "seeds cannot be compared: they are those of seed 0, and beside them stand ratios to the "
        "table's default of the same seed, with several seeds their mean, least and most.",
        "",
        *_between_seeds(rows),
        *_commands("ablations"),
    ]
    run = {title: [e for e in entries if e[0] in rows] for title, entries in ABLATIONS.items()}
    missing = {name for entries in ABLATIONS.values() for name, _, _ in entries} - rows.keys()
    if missing:
        lines += [f"{len(missing)} rows are not run yet and left out.", ""]
    for title, entries in run.items():
        if len(entries) < 2:
            continue
        lines += [f"### {title}", "", *_ablation(rows, tried, title, entries), ""]
    lines += ["The source's figures say, by ratios of perplexities of equal seeds:", ""]
    lines += [
        f"- {claim.said}: {verdict(ratios(rows.get(claim.first, []), rows.get(claim.second, [])))}"
        for claim in CLAIMS
        if rows.keys() >= {claim.first, claim.second}
    ]
    return [*lines, ""]


def _between_seeds(rows: Rows) -> list[str]:
    over = [
        ratios(found, rows.get(found[0]["model"], []))
        for name, found in rows.items()
        if name != found[0]["model"]
    ]
    apart = [max(found) - min(found) for found in over if len(found) > 1]
    if not apart:
        return []
    return [
        f"**From seed to seed a ratio differs by up to {max(apart):.2f}**: one seed that is nearer "
        "to 1 than that says nothing.",
        "",
    ]


def _ablation(
    rows: Rows, tried: Rows, title: str, entries: list[tuple[str, str, float | None]]
) -> list[str]:
    routed = title.startswith("Table 15")
    more = " α of layer 0 | Gini | top share |" if routed else ""
    lines = table_head(f"| | rate | perplexity | over the default's | the source's |{more}")
    source = {name: figure for name, _, figure in entries}
    for name, said, figure in entries:
        found = rows.get(name, [])
        default = found[0]["model"] if found else "protot"
        over = ratios(found, rows.get(default, []))
        cells = [
            said,
            _rate(found[0]["rate"], tried[name]) if found else "–",
            next((f"{perplexity(row):.1f}" for row in found if row["seed"] == 0), "–"),
            "" if name == default else (spread(over, ".3f") if over else "–"),
            "–" if figure is None else f"{figure} ({figure / (source[default] or 1):.3f})",
        ]
        if routed:
            gates = [row["gates"][-1] for row in found if row.get("gates")]
            cells += [
                spread([one[key] for one in gates], ".3f") if gates else "–"
                for key in ("alpha", "write_gini", "write_top_share")
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
