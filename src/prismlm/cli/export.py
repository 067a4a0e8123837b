"""prismlm push and export: a model on the Hugging Face Hub, or in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import argument, flag, option

Private = Annotated[bool, flag("--private", "Only its owners see it; a public one is refused.")]
Licenses = Annotated[list[str] | None, option("NAME", "Licence that allows sharing; repeatable.")]
DryRun = Annotated[bool, flag("--dry-run", "Print the card and file names; upload nothing.")]
FORMAT_HELP = "sae-lens: for SAE.load_from_disk. neuronpedia: for an importer of your own."


def push(
    model: opt.Model,
    name: Annotated[str, argument("ORG/NAME", "Its name on the hub.")],
    lens: opt.Lens = None,
    private: Private = False,
    no_lens: Annotated[bool, flag("--no-lens", "Leave out the lens, and so all text.")] = False,
    allow_license: Licenses = None,
    dry_run: DryRun = False,
) -> None:
    """Upload a model with its lens and a card to the Hugging Face Hub."""
    from prismlm.explain.language_model import load

    options: dict[str, Any] = {"private": private, "with_lens": not no_lens, "dry_run": dry_run}
    options["allow_licenses"] = allow_license or ()
    pushed = load(model, lens=lens).push_to_hub(name, **options)
    typer.echo(f"{pushed.card}\nFiles: {', '.join(pushed.files)}" if dry_run else pushed.url)


def export(
    model: opt.Model,
    out: Annotated[Path, argument("DIR", "A new directory.")],
    to: Annotated[Literal["sae-lens", "neuronpedia"], option("FORMAT", FORMAT_HELP)],
    lens: opt.Lens = None,
) -> None:
    """Write the prototypes for SAELens, or their cards for Neuronpedia."""
    from prismlm.explain.exports import export_neuronpedia, export_sae_lens
    from prismlm.explain.language_model import load

    lm = load(model, lens=lens)
    (export_sae_lens if to == "sae-lens" else export_neuronpedia)(lm, out)
    typer.echo(str(out))
