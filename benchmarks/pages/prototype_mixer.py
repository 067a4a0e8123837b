"""The source's Tables 1 and 15 to 20 beside runs at a laptop's size, for ``prototype_mixer.md``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.prototype_mixer.tables import CONTEXTS, DOCUMENTS, EPOCHS, ROW, SOURCE, dev_ce
from benchmarks.shared.over_seeds import spread

Row = dict[str, Any]
Rows = dict[str, list[Row]]
# The source's training text (§4), which its models read ten times.
SOURCE_TOKENS = 10 * 234.9e6
RATES = 3  # of a row that takes none of another's


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the runs of every row at its best rate, and functions over them."""
    contexts, ablations = (
        best_runs(all_runs(read(f"prototype_mixer/tables/{part}/*.json")))
        for part in ("contexts", "ablations")
    )
    longer: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in sorted(read("prototype_mixer/longer-*.json"), key=lambda row: row["model"]):
        longer[row["model"]][row["seed"]] = row
    every = [row for rows in (contexts, ablations) for runs in rows.values() for row in runs]
    return {
        "contexts": contexts,
        "ablated": _ablated(ablations),
        "between_seeds": max(
            max(over) - min(over)
            for name, runs in ablations.items()
            if name != runs[0]["model"]
            and len(over := ratios(runs, ablations.get(runs[0]["model"], []))) > 1
        ),
        "longer": longer,
        "environments": [row["environment"] for row in every],
        **_four_models(read),
        "names": SOURCE["names"],
        "titles": SOURCE["names"] | SOURCE["wider"],
        "theirs": SOURCE["table_1"],
        "lengths": CONTEXTS,
        "sizes": {"row": ROW, "documents": DOCUMENTS, "epochs": EPOCHS},
        "ratios": ratios,
    }


def _ablated(ablations: Rows) -> list[list[str]]:
    """Return a row for each setting but the defaults: its ratio, and the source's."""
    table: list[list[str]] = []
    for title, entries in SOURCE["ablations"].items():
        figure_of = {name: figure for name, _, figure in entries}
        for name, said, figure in entries:
            rows = ablations.get(name, [])
            if not rows or name == rows[0]["model"]:
                continue
            default = rows[0]["model"]
            source = "–" if figure is None else f"{figure / (figure_of[default] or 1):.3f}"
            over = spread(ratios(rows, ablations.get(default, [])), ".3f")
            first = not table or all(title != row[0] for row in table)
            table.append([title if first else "", said, over, source])
    return table


def _four_models(read: Callable[..., Any]) -> dict[str, Any]:
    """Return larger models trained for longer, by tokens and model."""
    folder = "prototype_mixer/four_models"
    # Files of the rates that were tried first have the rate in their name.
    runs = [run for run in read(f"{folder}/*.json") if "curve" in run]
    runs += [run for steps in (1500, 3000) for run in read(f"{folder}/steps_{steps}/*.json")]
    longest: dict[int, dict[str, Row]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: run["steps"]):
        longest[run["steps"]]["mamba" if run["model"] == "mamba2" else run["model"]] = run
    return {
        "four": longest,
        "read_tokens": {
            steps: max(run["tokens"] for run in by.values()) for steps, by in longest.items()
        },
        "beyond_source": SOURCE_TOKENS / max(run["tokens"] for run in runs),
    }


def all_runs(results: Iterable[Row]) -> Rows:
    """Return every run of every row."""
    rows: Rows = defaultdict(list)
    for row in results:
        rows[row["row"]].append(row)
    return rows


def best_runs(every: Rows) -> Rows:
    """Return the runs of every row at the rate that was best with seed 0, by the row's name.

    Rows without enough rates, at which the best is not known yet, are left out.
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
