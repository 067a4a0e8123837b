"""Heads on SmolLM2, what ships with the demo, and the time to attach, for ``smollm2.md``."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    by = ("weights", "prototypes", "per_token", "states", "part", "steps")
    # Of heads that differ in text or steps alone, those with most; `nearest` was only a trial.
    most = max(run["states"] for run in runs if run["weights"] == "cosine")
    shown = [
        run
        for run in runs
        if (run["states"] >= most and run["prototypes"] >= 8192 and run["per_token"] > 32)
        and run["weights"] != "nearest"
    ]
    every_k = [{"last": run["points"][-1]} | run for run in read("attach_k/*.json")]
    by_k = [run for run in every_k if run["part"] == "fit"]
    random_by_k = {r["per_token"]: r["last"] for r in every_k if r["part"] == "control"}
    least = min(over(run["last"]) for run in by_k)
    return {
        "runs": sorted(shown, key=lambda run: [run[name] for name in by]),
        "best": best,
        "control": next(r for r in runs if r["part"] == "control" and _same_head(r, best)),
        "by_k": sorted(by_k, key=lambda run: run["per_token"]),
        "random_by_k": random_by_k,
        "smallest_k": min(
            run["per_token"] for run in by_k if over(run["last"]) <= least + WITHIN / 100
        ),
        "within": WITHIN,
        "over": over,
        **_shipped(),
    }


def over(point: Row) -> float:
    """Return how far the cross-entropy of prototypes alone is above the model's, as a share."""
    return point["prototype_only_ce"] / point["ce"] - 1


def _same_head(run: Row, other: Row) -> bool:
    return all(run[name] == other[name] for name in ("prototypes", "per_token", "weights"))


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
