"""prismlm train and attach: from a recipe, or from an existing model, to a model directory."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prismlm.explain.quality import HeadQuality
    from prismlm.training import AttachResult, Recipe, TrainingResult, TrialResult

MAX_TRIALS = 15
Settings = Annotated[list[str] | None, option("KEY=VALUE", "Replace a recipe value.", "--set")]
HeadPrototypes = Annotated[int | None, option("K", "Default: 8192, or one for 16 positions.")]
HeadWeights = Annotated[Literal["cosine", "fitted"], option(None, "How prototypes are weighted.")]
Window = Annotated[int | None, option("N", "Tokens read at once (default: 512).", min=1)]
RATE_HELP = "Learning rate, in units of the prototypes' elements."
Lora = Annotated[bool, flag("--lora", "Fine-tune the model on the text first. Extra: lora.")]
Uncertainty = Annotated[bool, flag("--uncertainty", "Train a table of uncertainty feedback.")]
UNCERTAINTY_LOSSES = {
    "ce": "CE, uncertainty fed back",
    "ce_without": "CE, nothing fed back",
    "ce_shuffled": "CE, shuffled codes (control)",
}


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
    if dry_run and search:
        raise InputError("--dry-run is of one run: leave out --search.")
    if dry_run:
        return output.show_cost(training.estimate(loaded, resume=resume), as_json)
    (_search if search else _train)(loaded, resume=resume, as_json=as_json)


def _train(recipe: Recipe, *, resume: bool, as_json: bool) -> None:
    from prismlm.training import train as run

    if not output.is_first_process():
        run(recipe, resume=resume)
        return
    warn = partial(typer.echo, err=True)
    result = run(recipe, resume=resume, progress=output.progress(), on_warning=warn)
    output.show(result.to_dict(), as_json, _trained(result, recipe.corpus))


def _search(recipe: Recipe, *, resume: bool, as_json: bool) -> None:
    from prismlm.training import search

    def announce(trial: TrialResult) -> None:
        spread = "" if trial.deviation is None else f" ± {trial.deviation:.4f}"
        outcome = f"failed: {trial.failed}" if trial.ce is None else f"CE {trial.ce:.4f}{spread}"
        which = f"trial {trial.trial} of {recipe.search.trials}"
        typer.echo(f"{which} ({_values(trial)}): {outcome}", err=True)

    result = search(recipe, resume=resume, progress=output.progress(), on_trial=announce)
    failed, ranked = sum(trial.ce is None for trial in result.trials), result.ranked
    summary = f"{len(result.trials)} trials, {failed} failed · CE on held-out text, mean of seeds"
    parts: list[Any] = [output.heading(str(result.directory)), summary]
    if len(result.trials) < recipe.search.trials:
        parts.append(f"Other processes are training the rest of {recipe.search.trials} trials.")
    rows = [vars(trial) | {"values": _values(trial)} for trial in ranked]
    parts.append(output.table("trials", "trial ce:.4f deviation:.4f values", rows, MAX_TRIALS))
    if result.best is not None:
        parts.append(output.verbatim(f"Train the best with: prismlm train {result.best_recipe}"))
    output.show(result.to_dict(), as_json, *parts)


def _values(trial: TrialResult) -> str:
    """Return the values of a trial by recipe key."""
    values = trial.values.items()
    return ", ".join(f"{key} {f'{x:.4g}' if isinstance(x, float) else x}" for key, x in values)


def _trained(result: TrainingResult, corpus: Path) -> Iterator[Any]:
    from prismlm.training.evaluation import perplexity

    facts = {"model": str(result.directory), "steps": result.steps, "tokens": result.tokens}
    yield facts | {"ce": result.ce}
    next_command = ["attach", str(result.directory), "--corpus", str(corpus)]
    if result.quality is None:
        next_command += ["--out", f"{result.directory}-attached"]
    else:
        yield from _quality(result.quality)
        next_command[0] = "index"
    yield f"\nPerplexity on held-out text: {perplexity(result.ce):,.2f}. {result.verdict}"
    yield output.verbatim(f"Next:\n  prismlm {shlex.join(next_command)}")


def _quality(quality: HeadQuality) -> Iterator[Any]:
    yield output.heading("\nThe prototypes in place of the hidden states, on held-out text")
    yield quality.to_dict() | {"gain over the mean state recovered": quality.recovered}


def attach(
    model: Annotated[str, argument("MODEL", "A directory, GGUF file or hub name.")],
    corpus: Annotated[list[Path], option("DIR|FILE", "A corpus, or texts; repeatable.")],
    out: Annotated[Path, option("DIR", "The model directory to write.")],
    skip_bad_rows: opt.SkipBadRows = False,
    revision: Annotated[str | None, option("NAME", "Branch, tag or commit on the hub.")] = None,
    prototypes: HeadPrototypes = None,
    prototypes_per_token: Annotated[int, option("k", "Maximum per token.")] = 64,
    weights: HeadWeights = "fitted",
    epochs: Annotated[float, option("N", "Passes of the head over the states.")] = 4.0,
    batch: Annotated[int, option("N", "States per step.")] = 256,
    learning_rate: Annotated[float, option("R", RATE_HELP, "--rate")] = 0.03,
    states_gb: Annotated[float, option("GB", "Maximum disk space for hidden states.")] = 4.0,
    keep_states: Annotated[bool, flag("--keep-states", "Keep the hidden states.")] = False,
    window: Window = None,
    contexts: opt.Contexts = 64,
    positions: opt.PositionShare = 1.0,
    codes: opt.Codes = "int8",
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    lora: Lora = False,
    lora_epochs: Annotated[float, option("N", "Epochs of fine-tuning.")] = 1.0,
    uncertainty: Uncertainty = False,
    uncertainty_epochs: Annotated[float, option("N", "Epochs of the table.")] = 1.0,
    seed: opt.Seed = 0,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Attach prototypes to any Hugging Face model, and index text with them.

    The model's weights stay as they are, unless --lora fine-tunes them first. --uncertainty trains
    a table that feeds the entropy of each prediction back to the next input. Run again to resume.
    Processes of torchrun divide the work.
    """
    if lora:
        opt.require_packages("peft")
    opt.check_unused("without --lora", lora_epochs=not lora and lora_epochs != 1)
    opt.check_unused(
        "without --uncertainty", uncertainty_epochs=not uncertainty and uncertainty_epochs != 1
    )
    from prismlm import training
    from prismlm.lens.cells import check_codes
    from prismlm.lens.options import check_share

    check_share(positions)
    check_codes(codes)
    parts: dict[str, Any] = {
        "fit": opt.fill(training.FitOptions, locals()),
        "lora": training.LoraOptions(lora_epochs, seed=seed) if lora else None,
        "uncertainty": training.TableOptions(uncertainty_epochs, seed=seed)
        if uncertainty
        else None,
    }
    options = opt.fill(training.AttachOptions, locals(), **parts)
    if dry_run:
        return output.show_cost(training.estimate_attach(model, corpus, options), as_json)
    result = training.attach(model, corpus, out, options, progress=output.progress())
    if output.is_first_process():
        output.show(result.to_dict(), as_json, _attached(result))


def _attached(result: AttachResult) -> Iterator[Any]:
    losses = result.uncertainty or {}
    facts = {title: losses[name] for name, title in UNCERTAINTY_LOSSES.items() if name in losses}
    yield {"states": result.states, "lens": str(result.lens)} | facts
    yield from _quality(result.quality)
    yield output.verbatim(str(result.directory))
