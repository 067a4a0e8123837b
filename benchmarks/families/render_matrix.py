"""Write the matrix of docs/families.md from its JSON; ``--check`` only compares."""

from __future__ import annotations

from benchmarks.shared.matrix import Matrix

MATRIX = Matrix("families", "tests/models/test_sidecar_families.py", "families.json", "families.md")


def main() -> int:
    """Render, or say whether the page is up to date."""
    return MATRIX.main(__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
