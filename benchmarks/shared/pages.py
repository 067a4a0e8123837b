"""Generated pages of docs/results/: written, or compared with what their JSON gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path("docs/results")
PLACE = (("", "date"), ("at ", "commit"), ("on ", "machine"))
VERSIONS = (("Python", "python"), ("torch", "torch"), ("transformers", "transformers"))


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


def measured_on(where: dict[str, Any] | None) -> str:
    """Return a sentence on what figures were measured with, from what a benchmark noted of it."""
    if not where:
        return "When, at which commit and on what this was measured was not noted."
    words = ["Measured", *(f"{joint}{where[key]}" for joint, key in PLACE if key in where)]
    versions = [f"{name} {where[key]}" for name, key in VERSIONS if key in where]
    return f"{' '.join(words)}; {', '.join(versions)}."


def runs_made(environments: list[dict[str, Any]]) -> str:
    """Return :func:`measured_on` of the newest of many runs, and how many each place made.

    The same seed ends elsewhere on another processor, so that is said where it was noted.
    """
    newest = max(environments, key=lambda where: where["date"])
    # Outside of a clone no commit is noted; older runs noted the architecture alone.
    places = Counter(
        (where.get("commit") or "no commit noted", where.get("processor") or "not noted")
        for where in environments
    )
    said = ", ".join(
        f"{count} at {commit}, {processor}" for (commit, processor), count in sorted(places.items())
    )
    several = len({processor for _, processor in places}) > 1
    caution = " [What another processor changes](processors.md)." if several else ""
    return (
        f"{measured_on(newest)}\n\nRuns by commit and processor: {said}.{caution} Commits that are "
        "not in the history were put together with later ones before they came into it."
    )
