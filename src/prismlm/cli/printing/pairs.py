"""The figures of ``prismlm eval pairs`` as a table."""

from __future__ import annotations

from typing import Any

from prismlm.cli.output import console_for_reading, table_of


def print_pairs(result: dict[str, Any]) -> None:
    """Print of each slice how alike its pairs are, where they come from and what was filtered."""
    table = table_of(
        "slice", "*pairs", "*similarity", "*distance", "sources", "*candidates", "filtered"
    )
    for row in result["slices"]:
        sources, filtered = (
            ", ".join(f"{name} {count:,}" for name, count in row[key].items()) or "none"
            for key in ("sources", "filtered")
        )
        figures = (f"{row['pairs']:,}", f"{row['similarity']:.3f}", f"{row['distance']:.2f}")
        table.add_row(row["slice"], *figures, sources, f"{row['candidates']:,}", filtered)
    console_for_reading().print(table)
