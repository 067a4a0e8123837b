"""Shares of questions with their intervals, for ``asked.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow.parquet as pq

from benchmarks.attach.demo_lessons import subject
from benchmarks.attribution.asked import PASSAGES, in_new_words, questions
from prismlm.demo.prompts import ABSENT
from prismlm.demo.texts import pairs_path
from prismlm.explain.subject import WORTH_SHOWING
from prismlm.statistics import wilson

Row = dict[str, Any]


def figures(read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the questions by kind, and functions over them.

    Raises:
        KeyError: an answer or a passage is not judged.
    """
    result = read("asked.json")
    rows = in_new_words(result["questions"])
    result = result | {"questions": rows}
    answered = [row for row in rows if row["set"] == "answered"]
    names = read("asked/names.jsonl")
    answerable = [row for row in result["demo"] if row["topic"] not in ABSENT]
    return {
        "result": result,
        "answered": answered,
        "stated": [row for row in answered if row["states_the_facts"]],
        "others": [row for row in answered if not row["states_the_facts"]],
        "answerable": answerable,
        "unsupported": sum(
            row["support"] == "none" for row in result["demo"] if row["topic"] in ABSENT
        ),
        "shown": [
            one
            for row in answerable
            for one in row["passages"]["prismlm"]
            if one["shown"] and row["support"] != "none"
        ],
        "first_five": lambda by: [p for r in answerable for p in r["passages"][by][:PASSAGES]],
        "outside": [row for row in rows if row["set"] in ("heldout", "foreign")],
        "share": share,
        "ranked": ranked,
        "supported": supported,
        "of_subject": of_subject,
        "right": right,
        "clear": {
            by: right_of([one["clear"] for one in names if one["by"] == by])
            for by in ("reader", "embedded")
        },
        "chosen_on": len(questions("choose")),
        "worth_showing": WORTH_SHOWING,
        "passages": PASSAGES,
    }


def share(held: Sequence[bool]) -> str:
    """Return how many hold, with a 95 % interval."""
    interval = wilson(sum(held), len(held))
    return f"{sum(held) / len(held):.0%} ({interval.low:.0%} to {interval.high:.0%})"


def ranked(rows: Sequence[Row], order: str, within: int, rank: str = "rank") -> str:
    """Return for how many questions the document, or the page, with the answer is so early."""
    return share([row[rank][order] <= within for row in rows])


def supported(rows: Sequence[Row], level: str, by: str = "support") -> str:
    """Return how many answers have a level of support."""
    return share([(row[by] or "none") == level for row in rows])


def of_subject(rows: Sequence[Row], kind: str, order: str | None = None) -> str:
    """Return how many documents have a title of the question's own subject."""
    pairs = pq.read_table(pairs_path(), columns=["id", "title"]).to_pylist()
    known = {row["id"]: subject(row["title"]) for row in pairs}
    held = [
        known.get(name) == known[row["id"]]
        for row in rows
        if row["support"] != "none"
        for name in (row[kind][order] if order else row[kind])
    ]
    return f"{sum(held) / len(held):.0%} of {len(held)}"


def right(passages: Sequence[Row]) -> str:
    """Return how many passages are about the answer's subject."""
    return right_of([one["of_subject"] for one in passages])


def right_of(held: Sequence[bool]) -> str:
    """Return how many hold of how many."""
    return f"{sum(held)} of {len(held)}"
