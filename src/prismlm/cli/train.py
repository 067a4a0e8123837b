"""prismlm train: from a recipe to a model directory."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import DryRun, Json, is_first_process
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.training import TrainingEstimate, TrainingResult


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, in YAML.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace one value of the recipe."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train a model with its prototypes from a recipe."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.progress import SILENT
    from prismlm.training import estimate, load_recipe
    from prismlm.training import train as run

    loaded = load_recipe(recipe, settings or [])
    speaks = is_first_process()
    if dry_run:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise InputError("--dry-run measures one process. Run it without torchrun.")
        expected = estimate(loaded, resume=resume)
        _print_json(expected.to_dict()) if as_json else _print_estimate(expected)
        return
    try:
        result = run(loaded, resume=resume, progress=ConsoleReporter() if speaks else SILENT)
    except KeyboardInterrupt as stop:
        if not speaks:
            raise
        again = ["prismlm", "train", str(recipe)]
        for setting in settings or []:
            again += ["--set", setting]
        typer.echo(
            f"{str(stop) or 'stopped'}. Go on with:\n  {shlex.join([*again, '--resume'])}", err=True
        )
        raise
    if speaks:
        _print_json(result.to_dict()) if as_json else _print_result(result)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


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


def _print_estimate(expected: TrainingEstimate) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from prismlm.cli.format import count, duration, size

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in (
        ("model", f"{count(expected.parameters)} parameters"),
        ("head", f"{count(expected.head_parameters)} parameters"),
        ("steps", f"{expected.steps:,} of {expected.seconds_per_step * 1000:.0f} ms"),
        ("tokens", f"{count(expected.tokens)}, {expected.passes:.2f} passes over the text"),
        ("padding", f"{expected.padding:.1%} of the positions"),
        ("precision", f"{expected.precision} on {expected.device}"),
        ("time", f"about {duration(expected.seconds)}"),
        ("memory", f"about {size(expected.memory_bytes)}"),
        ("disk", f"about {size(expected.disk_bytes)}"),
    ):
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"[dim]{escape(expected.basis)} Nothing was written.[/]", soft_wrap=True)
