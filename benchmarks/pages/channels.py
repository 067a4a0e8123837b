"""Interventions on channels beside drawn ones, for ``channels.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prismlm.probes.channels.effects import channel_name

Row = dict[str, Any]
UNSELECTED = 3


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what the page's tables show."""
    value = read("channels.json")
    tested = value["settings"]["tested"]
    effects = [_effect(concept, tested) for concept in value["concepts"]]
    rows = [row for model in value["models"] for row in model["rows"] if not row.get("bundled")]
    return {
        "value": value,
        "effects": effects,
        "won": sum(effect["beats_controls"] for effect in effects),
        "emerged": _emerged(rows),
        "unselected": [
            (
                _channel(row),
                f"{row['half_life']:.1f}",
                ", ".join(f"{_code(one['text'])} ×{one['ratio']:.1f}" for one in row["tokens"][:6]),
            )
            for row in value["channels"][:UNSELECTED]
        ],
        "channel": _channel,
        "cell": _cell,
        "ends": _ends,
    }


def _channel(row: Row) -> str:
    return channel_name((row["layer"], row["channel"]))


def _effect(concept: Row, name: str) -> Row:
    return next(e for e in concept["effects"] if e["intervention"] == name)


def _emerged(rows: list[Row]) -> tuple[int, ...]:
    """Return where a channel stands out, of how many, and beats its controls, of how many."""
    emerged = [row["found"]["emerges"] for row in rows if row["found"]]
    tested = [row["effect"]["beats_controls"] for row in rows if row["effect"]]
    return sum(emerged), len(emerged), sum(tested), len(tested)


def _code(text: str) -> str:
    return f"`{text.replace(' ', '·').replace(chr(10), '↵').replace('`', chr(39))}`"


def _cell(text: str) -> str:
    """Return text that a Markdown table takes as it is."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _ends(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"
