"""Generated pages of docs/results/: written, or compared with what their JSON gives."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.shared.options import RESULTS, script_options

BEFORE_NEW_OPERATIONS = ("041f69c2",)
"""Commits of GPU timings that are older than the operations as they are now."""


def page_options(description: str | None) -> argparse.ArgumentParser:
    """Return a renderer's parser: whether to compare only, and where the results are."""
    parser = script_options(description)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def escaped(text: str) -> str:
    """Return text whose characters mean nothing to Markdown."""
    return "".join("\\" + c if c in "\\`*_[]<>#|" else c for c in text)


def ranged(figure: dict[str, Any] | None, key: str, form: str) -> str:
    """Return a figure with the interval ``low`` to ``high`` beside it, or a dash for none."""
    if not figure:
        return "–"
    return "{} ({} to {})".format(*(format(figure[name], form) for name in (key, "low", "high")))


def publish(pages: dict[Path, str], *, check: bool) -> int:
    """Write every page, or only say whether it is up to date.

    Returns:
        The exit status: 1 if a page that was checked is not what its JSON gives.
    """
    stale = False
    for path, text in pages.items():
        if not check:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
            continue
        fresh = path.is_file() and path.read_text(encoding="utf-8") == text
        stale = stale or not fresh
        print(f"{path} is {'up to date' if fresh else 'not what the JSON gives; render it again'}")
    return int(stale)


def measured_on(where: dict[str, Any]) -> str:
    """Return a sentence on when, at which commit and on what figures were measured."""
    machine = where["machine"].removeprefix("x86_64, ").replace("1 threads", "1 thread")
    words = f"Measured {where['date']} at {where['commit']} on {machine}."
    older = where["commit"] in BEFORE_NEW_OPERATIONS
    return words + (" **Before the operations were rewritten: [GPU](gpu.md).**" if older else "")


def runs_made(environments: list[dict[str, Any]]) -> str:
    """Return :func:`measured_on` of the newest of many runs."""
    return measured_on(max(environments, key=lambda where: where["date"]))


def table(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table; columns of its head are separated by `` | ``."""
    columns = head.split(" | ")
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])
