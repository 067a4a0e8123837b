"""Timings of the prototype mixer by device and precision, and its goals, for ``mixer.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.shared.pages import ranged

Row = dict[str, Any]
LONG, SHORT = 4096, 256
# Part, what it is against, at how many positions, what the ratio is of, and the least wanted.
GOALS = (
    ("mixer", "mixer alone against attention", LONG, "attention", 3.0),
    ("step", "training step against LLaMA's", SHORT, "llama", 1.0),
    ("step", "training step against LLaMA's", LONG, "llama", 1.5),
)
MODELS = {"protot": "ProtoT", "llama": "LLaMA", "mamba": "Mamba", "deltanet": "DeltaNet"}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the parts on a CPU, and ratios with a column for each device and precision."""
    cpu, gpu = read("mixer.json")["parts"], read("mixer_cuda.json")["parts"]
    devices = [_of_kind(cpu, "float32"), _of_kind(gpu, "float32"), _of_kind(gpu, "bfloat16")]
    return {
        "headline": [_ratio(device["step"], LONG, "llama") for device in devices],
        "goals": [
            [
                f"{what}, {length:,} positions: at least {least:g} ×",
                *(_reached(_ratio(device[part], length, other), least) for device in devices),
            ]
            for part, what, length, other, least in GOALS
        ],
        "mixer": [
            [
                f"{row['rows']} × {row['length']:,}",
                *(
                    ranged(_ratio(device["mixer"], row["length"], "attention"), "ratio", ".2f")
                    for device in devices
                ),
            ]
            for row in devices[0]["mixer"]
        ],
        "throughput": [row for row in cpu["throughput"]["rows"] if row["length"] > 512],
        "decode": cpu["decode"]["rows"],
        "models": MODELS,
        "environments": [part["mixer"]["environment"] for part in (cpu, gpu)],
    }


def _of_kind(parts: Row, kind: str) -> dict[str, list[Row]]:
    return {
        name: [row for row in part["rows"] if row["dtype"] == kind] for name, part in parts.items()
    }


def _ratio(rows: list[Row], length: int, other: str) -> Row | None:
    for row in rows:
        if row["length"] == length and not row.get("dropout"):
            return row["ratios"].get("elapsed", row["ratios"]).get(other)
    return None


def _reached(ratio: Row | None, least: float) -> str:
    if ratio is None:
        return "–"
    return ranged(ratio, "ratio", ".2f") + ("" if ratio["ratio"] >= least else " **missed**")
