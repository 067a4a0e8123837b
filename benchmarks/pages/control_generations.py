"""The drawn answers of ``control_suppress.json``, for ``control_generations.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.shared.pages import escaped

TITLES = {"fact": "A planted fact", "topic": "A topic"}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the rows of each behaviour."""
    result = read("control_suppress.json")
    sections = [
        (
            title,
            [
                row
                | {
                    key: row[key] | {"text": escaped(" ".join(row[key]["text"].split()))}
                    for key in ("before", "after")
                }
                for row in result[name]["generations"]
            ],
        )
        for name, title in TITLES.items()
    ]
    return {"result": result, "sections": sections, "seed": 0}
