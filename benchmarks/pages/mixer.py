"""Timings of the prototype mixer by device and precision, and its goals, for ``mixer.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.shared.pages import measured_on

Row = dict[str, Any]
FILES = {
    "mixer.json": (" --throughput-rounds 2 --memory-share 0.9", "On a CPU"),
    # By itself, with nothing else in memory, so that Mamba's longest row has room.
    "mixer_throughput.json": (
        " --parts throughput --threads 1 --rounds 2 --memory-share 0.9 "
        "--out docs/results/mixer_throughput.json",
        "On a CPU, forward passes alone",
    ),
    "mixer_cuda.json": (" --device cuda --out docs/results/mixer_cuda.json", "On a GPU"),
}
LONG, SHORT = 4096, 256
# Part, what it is against, at how many positions, what the ratio is of, and the least wanted.
GOALS = (
    ("mixer", "mixer alone against attention", LONG, "attention", 3.0),
    ("step", "training step against LLaMA's", SHORT, "llama", 1.0),
    ("step", "training step against LLaMA's", LONG, "llama", 1.5),
    ("memory", "memory of the direct form", LONG, "direct", 10.0),
)
MODELS = {"protot": "ProtoT", "llama": "LLaMA", "mamba": "Mamba", "deltanet": "DeltaNet"}
MIXERS = {
    "attention": "attention",
    "direct": "direct form",
    "direct, folded": "direct form, folded",
}
# Table 14 of the source: iterations a second on a GPU.
SOURCE = {
    2048: (38.74, 100.47, 35.50, 43.54),
    4096: (20.61, 47.90, 19.04, 42.35),
    8192: (10.82, 21.72, 9.89, 44.89),
    16_384: (5.49, 8.08, 5.05, 40.20),
    32_768: (2.78, 2.61, 2.55, 27.78),
    65_536: (1.40, 0.74, 1.28, 17.34),
    131_072: (0.65, 0.20, 0.57, 9.41),
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the parts by heading and precision."""
    found = {file: read(file)["parts"] for file in FILES}
    return {
        "options": [options for options, _ in FILES.values()],
        "sections": [
            (title, kind, _of_kind(found[file], kind), "alone" in title)
            for file, (_, title) in FILES.items()
            for kind in dict.fromkeys(
                r["dtype"] for part in found[file].values() for r in part["rows"]
            )
        ],
        "headline": _ratio(found["mixer.json"]["step"]["rows"], LONG, "llama"),
        "goals": _goals,
        "models": MODELS,
        "mixers": MIXERS,
        "source": {length: dict(zip(MODELS, row, strict=True)) for length, row in SOURCE.items()},
        "left_out": _left_out,
        "made": _made,
        "left": [name for name in found["mixer.json"] if name not in found["mixer_cuda.json"]],
    }


def _of_kind(parts: Row, kind: str) -> Row:
    kept = {
        name: part | {"rows": [row for row in part["rows"] if row["dtype"] == kind]}
        for name, part in parts.items()
    }
    return {name: part for name, part in kept.items() if part["rows"]}


def _goals(parts: Row) -> Iterator[tuple[str, Row | None, bool | None]]:
    """Yield what was aimed at, the ratio, and whether it was reached; without dropout."""
    for part, what, length, other, least in GOALS:
        ratio = _ratio(parts.get(part, {}).get("rows", []), length, other)
        reached = None if ratio is None else ratio["ratio"] >= least
        yield f"{what}, {length:,} positions: at least {least:g} ×", ratio, reached


def _ratio(rows: list[Row], length: int, other: str) -> Row | None:
    for row in rows:
        if row["length"] == length and not row.get("dropout"):
            return row["ratios"].get("elapsed", row["ratios"]).get(other)
    return None


def _left_out(rows: list[Row]) -> str:
    """Return what was not run, and why."""
    names = MODELS | MIXERS
    notes = {
        f"{names[name]}{' with dropout' if row.get('dropout') else ''}{_place(row)}: {reason}."
        for row in rows
        for name, reason in row["skipped"].items()
    }
    return f"Not run: {' '.join(sorted(notes))}" if notes else ""


def _place(row: Row) -> str:
    return f" at {row['length']:,} positions" if "rows" in row else ""


def _made(name: str, part: Row) -> str:
    """Return what a part was run with: its own command, where it is not the page's."""
    where = part["environment"]
    on_cpu, threads = "×" in where["machine"], where["threads"]
    options = f"{'' if on_cpu else '--device cuda '}--parts {name} --rounds {part['rounds']}"
    for key in ("limit", "memory_share"):
        if key in part:
            options += f" --{key.replace('_', '-')} {part[key]:g}"
    # Given on a CPU only; a GPU's run has what PyTorch takes by itself.
    if threads != 2 and on_cpu:
        options += f" --threads {threads}"
    machine = f"{where['machine']}, {threads} {'thread' if threads == 1 else 'threads'}"
    command = f"`python -m benchmarks.prototype_mixer.timing {options}`"
    return f"{command} {measured_on(where | {'machine': machine})}"
