"""The figures of ``prismlm eval pairs`` as a table."""

from __future__ import annotations

from typing import Any

from prismlm.cli.output import console_for_reading, table_of


def print_pairs(result: dict[str, Any]) -> None:
    """Print of each slice how alike its pairs are, where they come from and what was filtered."""
    parts = {
        part: sorted({name for row in result["slices"] for name in row[part]})
        for part in ("sources", "left_out")
    }
    headings = [f"*{name}" for names in parts.values() for name in names]
    table = table_of("slice", "*pairs", "*cosine", "*edits", "*candidates", *headings, gap=1)
    for row in result["slices"]:
        counts = (f"{row[part].get(name, 0):,}" for part, names in parts.items() for name in names)
        figures = (f"{row['pairs']:,}", f"{row['similarity']:.3f}", f"{row['distance']:.2f}")
        table.add_row(row["slice"], *figures, f"{row['candidates']:,}", *counts)
    console_for_reading().print(table)
