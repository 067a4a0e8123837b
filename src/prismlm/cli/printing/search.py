"""A search for hyper-parameters, as ``prismlm train --search`` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prismlm.training import SearchResult, TrialResult

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

    from prismlm.cli.output import table_of

    console = Console(highlight=False)
    console.print(f"[bold]{escape(str(result.directory))}[/]", soft_wrap=True)
    failed = sum(trial.ce is None for trial in result.trials)
    seeds = max((len(trial.seeds) for trial in result.trials), default=0)
    counted = f"{len(result.trials)} trials, {failed} failed"
    console.print(f"{counted} · CE on held-out text at the end, mean of {seeds} seeds")
    keys = list(result.trials[0].values) if result.trials else []
    table = table_of(*(f"*{escape(name)}" for name in ("trial", "CE", "perplexity", *keys)))
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
    for trial in result.ranked[:TRIALS_SHOWN]:
        values = [escape(_shown(trial.values[key])) for key in keys]
        perplexity = "" if trial.perplexity is None else f"{trial.perplexity:.2f}"
        table.add_row(str(trial.number), _ce(trial), perplexity, *values)
    console.print(table)
    if len(result.ranked) > TRIALS_SHOWN:
        console.print(f"[dim]and {len(result.ranked) - TRIALS_SHOWN} more in search.csv[/]")
    again = f"prismlm train {result.best_recipe}"
    console.print(f"Train the best with: {escape(again)}", soft_wrap=True)


def _ce(trial: TrialResult) -> str:
    spread = "" if trial.deviation is None else f" ± {trial.deviation:.4f}"
    return f"{trial.ce:.4f}{spread}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
