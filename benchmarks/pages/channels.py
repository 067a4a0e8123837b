"""Interventions on channels beside drawn ones, for ``channels.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prismlm.instruments.channels.effects import SHORT, channel_name

Row = dict[str, Any]


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what the page's tables show."""
    value = read("channels.json")
    tested = value["settings"]["tested"]
    effects = [_effect(concept, tested) for concept in value["concepts"]]
    rows = [(model["model"], row) for model in value["models"] for row in model["rows"]]
    names = list(dict.fromkeys(row["name"] for _, row in rows))
    return {
        "value": value,
        "effects": effects,
        "won": sum(effect["beats_controls"] for effect in effects),
        "lowered": sum(effect["median_relative"] < 0 for effect in effects),
        "interventions": [SHORT[one["intervention"]] for one in value["concepts"][0]["effects"]],
        "rows": [(model, row) for name in names for model, row in rows if row["name"] == name],
        "emerged": {bundled: _emerged(rows, bundled=bundled) for bundled in (False, True)},
        "channel": lambda row: channel_name((row["layer"], row["channel"])),
        "cell": _cell,
        "plain": _plain,
        "code": _code,
        "ends": _ends,
    }


def _effect(concept: Row, name: str) -> Row:
    return next(e for e in concept["effects"] if e["intervention"] == name)


def _emerged(rows: list[tuple[str, Row]], *, bundled: bool) -> tuple[int, ...]:
    """Return where a channel stands out, of how many, and beats its controls, of how many."""
    kept = [row for _, row in rows if row["bundled"] == bundled]
    found = [row["found"]["emerges"] for row in kept if row["found"]]
    tested = [row["effect"]["beats_controls"] for row in kept if row["effect"]]
    return sum(found), len(found), sum(tested), len(tested)


def _code(text: str) -> str:
    return f"`{text.replace(' ', '·').replace(chr(10), '↵').replace('`', chr(39))}`"


def _plain(text: str) -> str:
    """Return text of a table's cell that Markdown does not read as marks."""
    shown = _cell(" ".join(text.split()))
    return "".join(f"\\{letter}" if letter in "*_<>[]`#$" else letter for letter in shown)


def _cell(text: str) -> str:
    """Return text that a Markdown table takes as it is."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _ends(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"
