"""Heads on SmolLM2, what ships with the demo, and the time to attach, for ``smollm2.md``."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import prismlm.demo
from benchmarks.shared.pages import escaped
from prismlm.demo.fetched import LENS, SHIPPED
from prismlm.explain.quality import HeadQuality
from prismlm.models.sidecar import META_FILE
from prismlm.training import FitOptions

Row = dict[str, Any]
# Prototypes shown, the seed that they are drawn by, and characters of a context on either side.
DRAWN, SEED, AROUND = 24, 0, 48
# How far the cross-entropy may be above that of the best k, in percentage points.
WITHIN = 5
WEIGHED = {
    "cosine": "weighed by cosines",
    "nearest": "the nearest, their weights fitted",
    "fitted": "chosen by matching pursuit, their weights fitted",
}
# What one run of a pair has that the other has not.
AGAINST = {
    ("cosine", "nearest"): "Weights fitted by non-negative least squares in place of cosines",
    ("nearest", "fitted"): "Prototypes chosen by matching pursuit in place of the nearest",
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return every run with its last point, and what the demo's archive says of itself."""
    # Cosines were the only way once.
    runs = [{"weights": "cosine", "last": run["points"][-1]} | run for run in read("attach/*.json")]
    fits = [run for run in runs if run["part"] == "fit"]
    best = min(fits, key=lambda run: over(run["last"]))
    fewest = min(run["states"] for run in fits if run["weights"] == "fitted")
    less_text = [r for r in runs if (r["weights"], r["states"]) == ("fitted", fewest)]
    by = ("weights", "prototypes", "per_token", "states", "part", "steps")
    more_text, slope = _more_text(fits)
    every_k = [{"last": run["points"][-1]} | run for run in read("attach_k/*.json")]
    by_k = [run for run in every_k if run["part"] == "fit"]
    random_by_k = {r["per_token"]: r["last"] for r in every_k if r["part"] == "control"}
    least = min(over(run["last"]) for run in by_k)
    return {
        "runs": sorted(runs, key=lambda run: [run[name] for name in by]),
        "best": best,
        "control": next(r for r in runs if r["part"] == "control" and _same_head(r, best)),
        "pairs": _pairs(fits),
        "fewest": fewest,
        "default_prototypes": FitOptions().of_states(fewest).prototypes,
        "less_text": sorted(
            (r for r in less_text if r["part"] == "fit"), key=lambda r: r["prototypes"]
        ),
        "less_controls": {r["prototypes"]: r["last"] for r in less_text if r["part"] == "control"},
        "more_text": more_text,
        "by_k": sorted(by_k, key=lambda run: run["per_token"]),
        "random_by_k": random_by_k,
        "smallest_k": min(
            run["per_token"] for run in by_k if over(run["last"]) <= least + WITHIN / 100
        ),
        "slope": slope,
        "longest": max(fits, key=lambda run: run["steps"]),
        "weighed": WEIGHED,
        "within": WITHIN,
        "over": over,
        "spent": read("attach_time.json"),
        **_shipped(),
    }


def over(point: Row) -> float:
    """Return how far the cross-entropy of prototypes alone is above the model's, as a share."""
    return point["prototype_only_ce"] / point["ce"] - 1


def _same_head(run: Row, other: Row) -> bool:
    return all(run[name] == other[name] for name in ("prototypes", "per_token", "weights"))


def _pairs(fits: list[Row]) -> list[tuple[str, Row, Row]]:
    """Return runs that differ in how prototypes are chosen or weighed, and in nothing else."""
    same = ("prototypes", "per_token", "states", "steps")
    return [
        (what, old, new)
        for (before, after), what in AGAINST.items()
        for new in fits
        for old in fits
        if (old["weights"], new["weights"]) == (before, after)
        and all(old[name] == new[name] for name in same)
    ]


def _more_text(fits: list[Row]) -> tuple[list[Row], float]:
    """Return heads of one size and as many steps on more states, and what doubling gives."""
    names = ("prototypes", "per_token", "steps", "weights")
    sizes = [tuple(run[name] for name in names) for run in fits]
    size = max(sizes, key=sizes.count)
    alike = [run for run, its in zip(fits, sizes, strict=True) if its == size]
    alike.sort(key=lambda run: run["states"])
    doublings = [math.log2(run["states"]) for run in alike]
    return alike, float(np.polyfit(doublings, [over(run["last"]) for run in alike], 1)[0])


def _shipped() -> dict[str, Any]:
    """Return what the demo's archive says of itself, its size, and prototypes nobody chose."""
    path = Path(prismlm.demo.__file__).parent / "shipped" / SHIPPED
    with zipfile.ZipFile(path) as archive:
        made = json.loads(archive.read(META_FILE))["provenance"]
        lens = json.loads(archive.read(f"{LENS}/meta.json"))
        prototypes, index = (
            pq.read_table(io.BytesIO(archive.read(f"{LENS}/{name}.parquet")))
            for name in ("prototypes", "index")
        )
    chosen = np.random.default_rng(SEED).choice(prototypes.num_rows, DRAWN, replace=False)
    numbers = index["prototype"].to_numpy()
    drawn: list[tuple[int, str, float, str]] = []
    for number in sorted(chosen.tolist()):
        row = prototypes.slice(number, 1).to_pylist()[0]
        rows = [index.slice(n, 1).to_pylist()[0] for n in np.flatnonzero(numbers == number)[:2]]
        name = escaped(row["name"].replace("|", "¦"))
        drawn.append((number, name, row["usage"], "; ".join(map(_context, rows)) or "none"))
    quality = made["quality"]
    return {
        "quality": quality | {"recovered": HeadQuality(**quality).recovered},
        "made": made["attached"],
        "lens": lens,
        "megabytes": path.stat().st_size / 1e6,
        "drawn": drawn,
    }


def _context(row: Row) -> str:
    """Return a context in one line."""
    text = f"…{row['before'][-AROUND:]}[{row['token'].strip()}]{row['after'][:AROUND]}…"
    return escaped(" ".join(text.split()).replace("|", "¦"))
