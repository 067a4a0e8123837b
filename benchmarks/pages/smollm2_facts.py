"""What the model was taught, and verdicts of the three judges, for ``smollm2_facts.md``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.pages.attribution import MEANING

SAME = "same answer at random"


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the parts of the study, the answers' ranks by level and what each judge says."""
    result = read("smollm2_facts.json")
    corpus, teach, recall = result["corpus"], result["teach"], result["recall"]["methods"]
    own = recall["explain"]
    ten, first = (own[key]["all"] for key in ("ten", "first"))
    least = ten["mean"] - ten["error"]
    equal = [n for n, m in recall.items() if n != "explain" and m["ten"]["all"]["mean"] >= least]
    ranks = {
        "before": np.array(teach["before"]["rank"]),
        "taught": np.array(teach["taught"]["rank"]),
        "in a document": np.array(teach["taught"]["rank in a document"]),
    }
    return result | {
        "meaning": MEANING | {"random": "control: documents at random"},
        "options": teach["options"],
        "known": {name: int((rank == 1).sum()) for name, rank in ranks.items()},
        "levels": [_level(level, teach, ranks) for level in corpus["copies"]],
        "ten": ten,
        "first": first,
        "same": SAME,
        "place": first["mean"] - 2 * first["error"] > first[SAME],
        "equal": equal,
        "patched": verdict(result["patch"]["methods"], "gain", "gain behind"),
        "forgot": verdict(result["forgetting"]["methods"], "lost", "behind"),
        "kept": np.mean(result["forgetting"]["kept"]),
        "judged": " ".join(map(shlex.quote, result["forgetting"]["methods"])),
        "environments": [part["environment"] for part in result.values()],
    }


def verdict(methods: dict[str, Any], key: str, behind: str) -> str:
    """Say which rivals ``explain`` is above by two errors of the difference."""
    rivals = {name: found[behind] for name, found in methods.items() if name != "explain"}
    above = [name for name, less in rivals.items() if less["mean"] > 2 * less["error"]]
    rest = [name for name in rivals if name not in above]
    own = methods["explain"][key]
    said = f"**{own['mean']:+.3f}** ± {own['error']:.3f} nats. "
    said += "" if "random" in above else "**Does not work** here: documents at random do as much. "
    said += f"Above {', '.join(above) or 'none'}"
    return said + (f"; not above {', '.join(rest)}." if rest else ".")


def _level(copies: int, teach: dict[str, Any], ranks: dict[str, np.ndarray]) -> list[str]:
    """Return the row of the facts of so many documents."""
    rows = np.array(teach["copies"]) == copies
    of_level = {name: rank[rows] for name, rank in ranks.items()}
    likely = [
        np.array(teach[name]["log_probability"])[rows].mean() for name in ("before", "taught")
    ]
    return [
        str(copies),
        str(rows.sum()),
        *(str((rank == 1).sum()) for rank in of_level.values()),
        *(f"{np.median(of_level[name]):g}" for name in ("before", "taught")),
        *(f"{mean:.2f}" for mean in likely),
    ]
