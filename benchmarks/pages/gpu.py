"""Ratios of before the operations were rewritten beside those of ``gpu.json``, for ``gpu.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.shared.pages import ranged

Row = dict[str, Any]
HEAD = "prototype_head_gpu/step-time-gpt2-small-16.json"
MIXER = ("step of 256", "step of 4096", "mixer of 4096")
GOALS = (
    ("a training step of GPT-2 small with 16,384 prototypes, over one without", "at most 1.04"),
    ("the same of GPT-2 XL", "at most 1.01"),
    ("speed of ProtoT's training step at 256 positions, over LLaMA's", "at least 0.5"),
    ("the same at 4,096", "at least 1.0"),
    ("speed of the prototype mixer at 4,096 positions, over attention", "at least 1.0"),
    ("a token decoded with uncertainty feedback, over one without", "at most 1.01"),
    ("a training step with uncertainty feedback of one pass, over one without", "at most 1.01"),
)


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the rows of the table, and what else ``gpu.json`` holds."""
    head, mixer, feedback = map(read, (HEAD, "mixer_cuda.json", "uncertainty_overhead_cuda.json"))
    now = (read("gpu.json", optional=True) or {"parts": {}})["parts"]
    timed = {name: part["figures"] for name, part in now.items() if "figures" in part}
    before = [
        head["recipes"]["default"],
        None,
        *map(_of_mixer(mixer["parts"]).get, MIXER),
        *_of_feedback(feedback),
    ]
    today = [
        *(timed.get(f"head, gpt2-{size}", {}).get("ratio") for size in ("small", "xl")),
        *map(_of_mixer(timed.get("mixer", {}).get("parts", {})).get, MIXER),
        *_of_feedback(timed.get("feedback", {})),
    ]
    return {
        "rows": [(*goal, *pair) for goal, *pair in zip(GOALS, before, today, strict=True)],
        "once": head["environment"],
        "now": now,
        "flat": flat,
    }


def _of_feedback(result: Row) -> list[Row | None]:
    timed = result.get("timed", {})
    return [timed.get(name, {}).get("one pass", {}).get("elapsed") for name in ("decode", "step")]


def _of_mixer(parts: Row) -> dict[str, Row]:
    """Return the ratios of ``MIXER`` in bf16: times of the other over those of prototypes."""
    return {
        f"{part} of {row['length']}": row["ratios"]["elapsed"].get(other)
        for part, other in (("step", "llama"), ("mixer", "attention"))
        for row in parts.get(part, {"rows": []})["rows"]
        if row["dtype"] == "bfloat16" and not row.get("dropout")
    }


def flat(values: Row, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield every figure by its name."""
    for key, value in values.items():
        name = f"{before}{key.replace('_', ' ')}"
        if isinstance(value, dict) and "ratio" in value and "low" in value:
            yield name, ranged(value, "ratio", ".3f")
        elif isinstance(value, dict):
            yield from flat(value, f"{name}: ")
        else:
            yield name, f"{value:,}" if isinstance(value, int) else str(value)
