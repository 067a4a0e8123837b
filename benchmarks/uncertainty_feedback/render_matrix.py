"""Write the matrix of docs/uncertainty_feedback.md from its JSON; ``--check`` only compares."""

from __future__ import annotations

from benchmarks.shared.matrix import Matrix

MATRIX = Matrix(
    "uncertainty",
    "tests/models/test_uncertainty_feedback_matrix.py",
    "uncertainty_matrix.json",
    "uncertainty_feedback.md",
)


def main() -> int:
    """Render, or say whether the page is up to date."""
    return MATRIX.main(__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
