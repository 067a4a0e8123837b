"""prismlm train: from a recipe to a model directory."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.format import count
from prismlm.cli.options import DryRun, Json, flag, is_first_process, option
from prismlm.cli.output import (
    console_for_reading,
    print_cost,
    print_json,
    print_rows,
    quality_rows,
    table_of,
)
from prismlm.errors import Interrupted

if TYPE_CHECKING:
    from prismlm.training import Recipe, SearchResult, TrainingResult, TrialResult
TRIALS_SHOWN = 15


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, in YAML.")],
    settings: Annotated[
        list[str] | None,
        option("KEY=VALUE", "Replace one value of the recipe.", "--set"),
    ] = None,
    search: Annotated[
        bool, flag("--search", "Search hyper-parameters, as the recipe's search says.")
    ] = False,
    resume: Annotated[
        bool, flag("--resume", "Resume from the newest checkpoint, or trial.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train a model with its prototypes from a recipe."""
    from prismlm.training import load_recipe

    loaded = load_recipe(recipe, settings or [])
    if dry_run:
        from prismlm.training import estimate, estimate_search

        measured = estimate_search if search else estimate
        print_cost(measured(loaded, resume=resume), as_json=as_json)
        return
    try:
        if search:
            _search(loaded, resume=resume, as_json=as_json)
        else:
            _train(loaded, resume=resume, as_json=as_json)
    except KeyboardInterrupt as stop:
        if not is_first_process():
            raise
        again = ["prismlm", "train", str(recipe), *(["--search"] if search else [])]
        for setting in settings or []:
            again += ["--set", setting]
        where = stop if isinstance(stop, Interrupted) else "stopped"
        typer.echo(f"{where}. Resume with:\n  {shlex.join([*again, '--resume'])}", err=True)
        raise


def _train(recipe: Recipe, *, resume: bool, as_json: bool) -> None:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.training import train as run

    told: dict[str, Any] = {}
    if speaks := is_first_process():
        told = {"progress": ConsoleReporter(), "on_warning": partial(typer.echo, err=True)}
    result = run(recipe, resume=resume, **told)
    if speaks:
        print_json(result.to_dict()) if as_json else _print_result(result, recipe.corpus)


def _search(recipe: Recipe, *, resume: bool, as_json: bool) -> None:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.training import search

    result = search(
        recipe,
        resume=resume,
        progress=ConsoleReporter(),
        on_trial=lambda trial: typer.echo(trial_line(trial, recipe.search.trials), err=True),
    )
    print_json(result.to_dict()) if as_json else print_search(result)


def _print_result(result: TrainingResult, corpus: Path) -> None:
    from prismlm.training.evaluation import perplexity

    rows = [
        ("model", str(result.directory)),
        ("steps", f"{result.steps:,}"),
        ("tokens", count(result.tokens)),
        ("CE", f"{result.ce:.3f}"),
    ]
    if result.quality is not None:
        rows += quality_rows(result.quality)
        rows.append(("measured on", f"{count(result.quality.tokens)} held-out tokens"))
    print_rows(rows, last="")
    console = console_for_reading()
    console.print(f"Perplexity on held-out text: {perplexity(result.ce):,.2f}. {result.verdict}")
    following = ["index", str(result.directory), "--corpus", str(corpus)]
    if result.quality is None:
        following = ["attach", *following[1:], "--out", f"{result.directory}-attached"]
    console.print(f"Next:\n  prismlm {shlex.join(following)}", soft_wrap=True)


def trial_line(trial: TrialResult, trials: int) -> str:
    """Return a finished trial in one line."""
    values = ", ".join(f"{key} {_shown(value)}" for key, value in trial.values.items())
    found = f"failed: {trial.failed}" if trial.ce is None else f"CE {_ce(trial)}"
    return f"trial {trial.number} ({values}): {found} · {trial.number + 1} of {trials} trials done"


def print_search(result: SearchResult) -> None:
    """Print the best trials, and where the rest is."""
    console = console_for_reading()
    console.print(str(result.directory), style="bold", soft_wrap=True)
    failed = sum(trial.ce is None for trial in result.trials)
    seeds = max((len(trial.seeds) for trial in result.trials), default=0)
    counted = f"{len(result.trials)} trials, {failed} failed"
    console.print(f"{counted} · CE on held-out text at the end, mean of {seeds} seeds")
    keys = list(result.trials[0].values) if result.trials else []
    table = table_of(*(f"*{name}" for name in ("trial", "CE", "perplexity", *keys)))
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
    for trial in result.ranked[:TRIALS_SHOWN]:
        values = [_shown(trial.values[key]) for key in keys]
        power = trial.to_dict()["perplexity"]
        perplexity = "" if power is None else f"{power:.2f}"
        table.add_row(str(trial.number), _ce(trial), perplexity, *values)
    console.print(table)
    if len(result.ranked) > TRIALS_SHOWN:
        console.print(f"and {len(result.ranked) - TRIALS_SHOWN} more in search.csv", style="dim")
    again = f"prismlm train {result.best_recipe}"
    console.print(f"Train the best with: {again}", soft_wrap=True)


def _ce(trial: TrialResult) -> str:
    spread = "" if trial.deviation is None else f" ± {trial.deviation:.4f}"
    return f"{trial.ce:.4f}{spread}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
