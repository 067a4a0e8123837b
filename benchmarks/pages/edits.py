"""Means over texts, and what a blind reader chose, for ``edits.md``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

Row = dict[str, Any]
KINDS = ("edited", "control", "plain", "removed")


def figures(read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the texts of clamps and of categories, and functions over them."""
    result = read("edits.json")
    rows: list[Row] = result["texts"]
    removed = {row["words"] for row in rows if row["kind"] == "removed"}
    choices = {line["id"]: line["choice"] for line in read("edits_answers.jsonl")}

    def recognised(some: list[Row], kind: str) -> str:
        """Return in how many texts the reader chose the subject."""
        own = of_kind(some, kind)
        right = sum(
            choices[row["id"]] > 0 and row["choices"][choices[row["id"]] - 1] == row["words"]
            for row in own
        )
        return f"{right} of {len(own)}"

    return {
        "result": result,
        "clamps": [row for row in rows if row["words"] not in removed],
        "groups": [row for row in rows if row["words"] in removed],
        "recognised": recognised,
        "average": average,
        "by_subject": by_subject,
        "kinds": KINDS,
        "curve": [
            (f"{one['strength']:.0%}", f"{one['within']:.0%}") for one in result["curve"][3::2]
        ],
    }


def of_kind(rows: list[Row], kind: str) -> list[Row]:
    """Return the texts of a kind."""
    return [row for row in rows if row["kind"] == kind]


def average(rows: list[Row], kind: str, key: str) -> float:
    """Return the mean of a figure over the texts of a kind."""
    return mean(row[key] for row in of_kind(rows, kind))


def by_subject(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the texts by their subject, in the order of the alphabet."""
    names = sorted({row["words"] for row in rows})
    return {name: [row for row in rows if row["words"] == name] for name in names}
