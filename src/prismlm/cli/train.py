"""prismlm train: from a recipe to a model directory."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli.options import DryRun, Json, flag, is_first_process, option
from prismlm.cli.output import print_json
from prismlm.errors import InputError, Interrupted

if TYPE_CHECKING:
    from prismlm.training import Recipe, TrainingResult


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
        bool, flag("--resume", "Go on from the newest checkpoint, or trial.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train a model with its prototypes from a recipe."""
    from prismlm.training import load_recipe

    loaded = load_recipe(recipe, settings or [])
    if dry_run:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise InputError("--dry-run measures one process. Run it without torchrun.")
        _estimate(loaded, search=search, resume=resume, as_json=as_json)
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
        typer.echo(f"{where}. Go on with:\n  {shlex.join([*again, '--resume'])}", err=True)
        raise


def _train(recipe: Recipe, *, resume: bool, as_json: bool) -> None:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.progress import SILENT
    from prismlm.training import train as run

    speaks = is_first_process()
    result = run(recipe, resume=resume, progress=ConsoleReporter() if speaks else SILENT)
    if speaks:
        print_json(result.to_dict()) if as_json else _print_result(result)


def _search(recipe: Recipe, *, resume: bool, as_json: bool) -> None:
    from prismlm.cli.printing.search import print_search, trial_line
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.training import search

    result = search(
        recipe,
        resume=resume,
        progress=ConsoleReporter(),
        on_trial=lambda trial: typer.echo(trial_line(trial, recipe.search.trials), err=True),
    )
    print_json(result.to_dict()) if as_json else print_search(result)


def _estimate(recipe: Recipe, *, search: bool, resume: bool, as_json: bool) -> None:
    from prismlm.cli.output import print_cost
    from prismlm.training import estimate, estimate_search

    measured = estimate_search if search else estimate
    print_cost(measured(recipe, resume=resume), as_json=as_json)


def _print_result(result: TrainingResult) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from prismlm.cli.format import count

    figures = [("CE", f"{result.ce:.3f}")]
    measured, quality = "", result.quality
    if quality is not None:
        measured = f" · measured on {count(quality.tokens)} held-out tokens"
        figures += [
            ("prototype-only CE", f"{quality.prototype_only_ce:.3f}"),
            ("explained share", f"{quality.explained_share:.3f}"),
            ("FVU", f"{quality.fvu:.3f}"),
            ("agreement", f"{quality.agreement:.1%}"),
            ("in use", f"{quality.in_use:.1%}"),
        ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in figures:
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(f"[bold]{escape(str(result.directory))}[/]", soft_wrap=True)
    console.print(f"{result.steps:,} steps · {count(result.tokens)} tokens{measured}")
    console.print(table)
