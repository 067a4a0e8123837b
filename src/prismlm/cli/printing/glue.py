"""The figures of ``prismlm eval glue`` as tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from prismlm.cli.output import console_for_reading, plain, table_of


def print_figures(result: dict[str, Any]) -> None:
    """Print each task's metrics over seeds, beside a constant answer and training from scratch."""
    console = console_for_reading()
    console.print(Text(plain(result["name"]), style="bold"))
    headings = ("*trained on", "*rows", "metric", "*mean (seeds)", "*constant", "*from scratch")
    table = table_of("task", *headings)
    for row in result["tasks"]:
        title = f"{row['title']} test" if row["split"].startswith("test") else row["title"]
        cells = [title, _share(row["train"]), _share(row["measured"])]
        for metric in row["metrics"]:
            found, fresh = row["fine_tuned"], row["from_scratch"]
            values = [100 * value for value in found["values"][metric]]
            spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
            table.add_row(
                *(cells if metric == row["metrics"][0] else ["", "", ""]),
                metric,
                f"{100 * found['mean'][metric]:.1f}{spread}",
                f"{100 * row['constant'][metric]:.1f}",
                f"{100 * fresh['mean'][metric]:.1f}" if fresh else "–",
            )
    console.print(table)
    rate = f"learning rate {result['learning_rate']:g}, warm-up {result['warmup']:g}"
    notes = [f"{rate} ({result['rate_from']})", "dev sets unless test is said", "figures × 100"]
    console.print(Text(" · ".join(notes), style="dim"), soft_wrap=True)


def print_search(result: dict[str, Any]) -> None:
    """Print what every rate and warm-up reached on dev, and the choice."""
    console = console_for_reading()
    table = table_of("learning rate", "warm-up", "*SST-2", "*MNLI")
    for one in result["tried"]:
        figures = (f"{100 * one[name]:.1f}" for name in ("sst2", "mnli"))
        table.add_row(f"{one['learning_rate']:g}", f"{one['warmup']:g}", *figures)
    console.print(table)
    chosen = f"chosen: {result['learning_rate']:g} with warm-up {result['warmup']:g}"
    console.print(Text(chosen, style="bold"))


def _share(rows: dict[str, Any]) -> str:
    """Return how many rows there are, of how many that GLUE has."""
    whole = rows["rows"] == rows["of"]
    return f"{rows['rows']:,}" if whole else f"{rows['rows']:,} of {rows['of']:,}"
