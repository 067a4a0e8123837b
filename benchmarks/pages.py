"""Generated pages of docs/results/: written, or compared with what their JSON gives."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path("docs/results")


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
