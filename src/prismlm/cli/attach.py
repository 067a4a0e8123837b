"""prismlm attach: a prototype head and a lens for an existing model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.progress import SILENT

if TYPE_CHECKING:
    from prismlm.training import AttachResult

Base = Annotated[str, argument("MODEL", "A directory, GGUF file or hub name.")]
Files = Annotated[list[Path], option("DIR|FILE", "A corpus, or texts; repeatable.")]
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


def attach(
    model: Base,
    corpus: Files,
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
    from prismlm import training
    from prismlm.lens.codes import check_codes
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
        output.print_cost(training.estimate_attach(model, corpus, options), as_json=as_json)
        return
    first = opt.is_first_process()
    progress = ConsoleReporter() if first else SILENT
    result = training.attach(model, corpus, out, options, progress=progress)
    if first:
        output.show(result.to_dict(), as_json, lambda: _print_result(result))


def _print_result(result: AttachResult) -> None:
    losses = result.uncertainty or {}
    facts = {title: losses[name] for name, title in UNCERTAINTY_LOSSES.items() if name in losses}
    output.print_facts({"states": result.states, "lens": str(result.lens)} | facts)
    output.print_quality(result.quality)
    typer.echo(str(result.directory))
