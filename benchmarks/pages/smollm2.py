"""Heads on SmolLM2, what ships with the demo, and the time to attach, for ``smollm2.md``."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import prismlm.demo
from prismlm.demo.fetched import LENS, SHIPPED
from prismlm.models.sidecar import META_FILE

Row = dict[str, Any]
# How far the cross-entropy may be above that of the best k, in percentage points.
WITHIN = 5


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
    # Of heads that differ in text or steps alone, those with most; the rest are summed up below.
    most = max(run["states"] for run in runs if run["weights"] == "cosine")
    shown = [run for run in runs if run["states"] >= most and run["prototypes"] >= 8192]
    every_k = [{"last": run["points"][-1]} | run for run in read("attach_k/*.json")]
    by_k = [run for run in every_k if run["part"] == "fit"]
    random_by_k = {r["per_token"]: r["last"] for r in every_k if r["part"] == "control"}
    least = min(over(run["last"]) for run in by_k)
    return {
        "runs": sorted(shown, key=lambda run: [run[name] for name in by]),
        "best": best,
        "control": next(r for r in runs if r["part"] == "control" and _same_head(r, best)),
        "fewest": fewest,
        "less_text": sorted(
            (r for r in less_text if r["part"] == "fit"), key=lambda r: r["prototypes"]
        ),
        "more_text": more_text,
        "by_k": sorted(by_k, key=lambda run: run["per_token"]),
        "random_by_k": random_by_k,
        "smallest_k": min(
            run["per_token"] for run in by_k if over(run["last"]) <= least + WITHIN / 100
        ),
        "slope": slope,
        "longest": max(fits, key=lambda run: run["steps"]),
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
    """Return what the demo's archive says of itself, and its size."""
    path = Path(prismlm.demo.__file__).parent / "shipped" / SHIPPED
    with zipfile.ZipFile(path) as archive:
        made = json.loads(archive.read(META_FILE))["provenance"]
        lens = json.loads(archive.read(f"{LENS}/meta.json"))
    return {
        "quality": made["quality"],
        "made": made["attached"],
        "lens": lens,
        "megabytes": path.stat().st_size / 1e6,
    }
