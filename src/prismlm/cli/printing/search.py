"""A search for hyper-parameters, as ``prismlm train --search`` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prismlm.cli.format import count, duration, size

if TYPE_CHECKING:
    from prismlm.training import SearchEstimate, SearchResult, TrialResult

TRIALS_SHOWN = 15


def trial_line(trial: TrialResult, trials: int) -> str:
    """Return a finished trial in one line."""
    values = ", ".join(f"{key} {_shown(value)}" for key, value in trial.values.items())
    found = f"failed: {trial.failed}" if trial.ce is None else f"CE {_ce(trial)}"
    return f"trial {trial.number} ({values}): {found} · {trial.number + 1} of {trials} trials done"


def print_search(result: SearchResult) -> None:
    """Print the best trials, and where the rest is."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(str(result.directory))}[/]", soft_wrap=True)
    failed = sum(trial.ce is None for trial in result.trials)
    seeds = max((len(trial.seeds) for trial in result.trials), default=0)
    counted = f"{len(result.trials)} trials, {failed} failed"
    console.print(f"{counted} · CE on held-out text at the end, mean of {seeds} seeds")
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    keys = list(result.trials[0].values) if result.trials else []
    for name in ("trial", "CE", "perplexity", *keys):
        table.add_column(escape(name), justify="right", overflow="fold")
    for trial in result.ranked[:TRIALS_SHOWN]:
        values = [escape(_shown(trial.values[key])) for key in keys]
        perplexity = "" if trial.perplexity is None else f"{trial.perplexity:.2f}"
        table.add_row(str(trial.number), _ce(trial), perplexity, *values)
    console.print(table)
    if len(result.ranked) > TRIALS_SHOWN:
        console.print(f"[dim]and {len(result.ranked) - TRIALS_SHOWN} more in search.csv[/]")
    again = f"prismlm train {result.best_recipe}"
    console.print(f"Train the best with: {escape(again)}", soft_wrap=True)


def print_search_estimate(expected: SearchEstimate) -> None:
    """Print what a search will take."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    least, most = duration(expected.seconds_least), duration(expected.seconds_most)
    steps = sorted({expected.first.steps, expected.last.steps})
    for name, value in (
        ("trials", f"{expected.trials_left} left of {expected.trials}"),
        ("runs", f"{expected.runs} of {' to '.join(f'{n:,}' for n in steps)} steps"),
        ("model", f"{count(expected.first.parameters)} parameters"),
        ("tokens", f"{count(expected.first.tokens)} a run"),
        ("precision", f"{expected.first.precision} on {expected.first.device}"),
        ("time", f"about {duration(expected.seconds)}, {least} to {most}"),
        ("memory", f"about {size(expected.memory_bytes)}"),
        ("disk", f"about {size(expected.disk_bytes)} at a time"),
    ):
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"[dim]{escape(expected.first.basis)} From the first and the last value of each key; "
        "evaluations and the sampler are left out. Nothing was written.[/]",
        soft_wrap=True,
    )


def _ce(trial: TrialResult) -> str:
    spread = "" if trial.deviation is None else f" ± {trial.deviation:.4f}"
    return f"{trial.ce:.4f}{spread}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
