"""prismlm train: from a recipe to a model directory."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli.options import DryRun, Json, flag, is_first_process, option
from prismlm.cli.output import print_cost, print_json, print_rows, quality_rows
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
    from prismlm.training import estimate, estimate_search

    measured = estimate_search if search else estimate
    print_cost(measured(recipe, resume=resume), as_json=as_json)


def _print_result(result: TrainingResult) -> None:
    from prismlm.cli.format import count

    rows = [
        ("steps", f"{result.steps:,}"),
        ("tokens", count(result.tokens)),
        ("CE", f"{result.ce:.3f}"),
    ]
    if result.quality is not None:
        rows += quality_rows(result.quality)
        rows.append(("measured on", f"{count(result.quality.tokens)} held-out tokens"))
    print_rows(rows, last=str(result.directory))
