"""prismlm train: from a recipe to a model directory."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError, Interrupted

if TYPE_CHECKING:
    from prismlm.training import Recipe, TrainingResult, TrialResult

MAX_TRIALS = 15
Settings = Annotated[list[str] | None, option("KEY=VALUE", "Replace a recipe value.", "--set")]


def train(
    recipe: Annotated[Path, argument("RECIPE", "A recipe, in YAML.")],
    settings: Settings = None,
    search: Annotated[bool, flag("--search", "Search hyper-parameters of the recipe.")] = False,
    resume: Annotated[bool, flag("--resume", "Resume from the newest checkpoint.")] = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Train a model with its prototypes from a recipe."""
    from prismlm import training

    loaded = training.load_recipe(recipe, settings or [])
    if dry_run:
        if search:
            raise InputError("--dry-run is of one run: leave out --search.")
        output.print_cost(training.estimate(loaded, resume=resume), as_json=as_json)
        return
    try:
        (_search if search else _train)(loaded, resume=resume, as_json=as_json)
    except KeyboardInterrupt as stop:
        if opt.is_first_process():
            command = ["prismlm", "train", str(recipe), *(["--search"] if search else [])]
            for setting in settings or []:
                command += ["--set", setting]
            state = stop if isinstance(stop, Interrupted) else "stopped"
            typer.echo(f"{state}. Resume with:\n  {shlex.join([*command, '--resume'])}", err=True)
        raise


def _train(recipe: Recipe, *, resume: bool, as_json: bool) -> None:
    from prismlm.training import train as run

    if not opt.is_first_process():
        run(recipe, resume=resume)
        return
    warn = partial(typer.echo, err=True)
    result = run(recipe, resume=resume, progress=ConsoleReporter(), on_warning=warn)
    output.show(result.to_dict(), as_json, lambda: _print_result(result, recipe.corpus))


def _search(recipe: Recipe, *, resume: bool, as_json: bool) -> None:
    from prismlm.training import search

    def announce(trial: TrialResult) -> None:
        spread = "" if trial.deviation is None else f" ± {trial.deviation:.4f}"
        outcome = f"failed: {trial.failed}" if trial.ce is None else f"CE {trial.ce:.4f}{spread}"
        which = f"trial {trial.trial} of {recipe.search.trials}"
        typer.echo(f"{which} ({_values(trial)}): {outcome}", err=True)

    result = search(recipe, resume=resume, progress=ConsoleReporter(), on_trial=announce)
    if as_json:
        output.print_json(result.to_dict())
        return
    failed = sum(trial.ce is None for trial in result.trials)
    output.say(str(result.directory), style="bold")
    output.say(f"{len(result.trials)} trials, {failed} failed · CE on held-out text, mean of seeds")
    if len(result.trials) < recipe.search.trials:
        output.say(f"Other processes are training the rest of {recipe.search.trials} trials.")
    ranked = result.ranked
    more = f", {MAX_TRIALS} of {len(ranked)}: --json has all" if len(ranked) > MAX_TRIALS else ""
    rows = [vars(trial) | {"values": _values(trial)} for trial in ranked[:MAX_TRIALS]]
    columns = "trial ce:.4f deviation:.4f values"
    output.print_rows(f"trials{more}", columns, rows)
    if result.best is not None:
        typer.echo(f"Train the best with: prismlm train {result.best_recipe}")


def _values(trial: TrialResult) -> str:
    """Return the values of a trial by recipe key."""
    values = trial.values.items()
    return ", ".join(f"{key} {f'{x:.4g}' if isinstance(x, float) else x}" for key, x in values)


def _print_result(result: TrainingResult, corpus: Path) -> None:
    from prismlm.training.evaluation import perplexity

    facts = {"model": str(result.directory), "steps": result.steps, "tokens": result.tokens}
    output.print_facts(facts | {"ce": result.ce})
    next_command = ["attach", str(result.directory), "--corpus", str(corpus)]
    if result.quality is None:
        next_command += ["--out", f"{result.directory}-attached"]
    else:
        output.print_quality(result.quality)
        next_command[0] = "index"
    output.say(f"\nPerplexity on held-out text: {perplexity(result.ce):,.2f}. {result.verdict}")
    typer.echo(f"Next:\n  prismlm {shlex.join(next_command)}")
