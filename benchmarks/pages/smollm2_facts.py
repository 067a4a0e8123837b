"""What the model was taught, and the three judges' figures, for ``smollm2_facts.md``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from benchmarks.pages.attribution import MEANING, SAME


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the parts of the study, and for how many facts the answer is the first choice."""
    result = read("smollm2_facts.json")
    teach, own = result["teach"], result["recall"]["methods"]["explain"]
    return result | {
        "meaning": MEANING | {"random": "control: documents at random"},
        "options": teach["options"],
        "known": {name: teach[name]["rank"].count(1) for name in ("before", "taught")},
        "ten": own["ten"]["all"],
        "first": own["first"]["all"],
        "same": SAME,
        "judged": " ".join(map(shlex.quote, result["forgetting"]["methods"])),
        "environments": [part["environment"] for part in result.values()],
    }
