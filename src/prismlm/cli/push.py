"""prismlm push: a model directory with its lens and a card, on the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import flag, option

Private = Annotated[bool, flag("--private", "Only its owners see it; a public one is refused.")]
Allowed = Annotated[
    list[str] | None, option("NAME", "Licence of text that you may pass on; may be repeated.")
]
DryRun = Annotated[
    bool, flag("--dry-run", "Print the card and the names of the files; upload nothing.")
]


def push(
    model: opt.Model,
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Its name on the hub.")],
    lens: opt.Lens = None,
    private: Private = False,
    no_lens: Annotated[bool, flag("--no-lens", "Leave out the lens, and so all text.")] = False,
    allow_license: Allowed = None,
    dry_run: DryRun = False,
) -> None:
    """Upload a model with its lens and a card to the Hugging Face Hub."""
    from prismlm.explain.language_model import load

    how: dict[str, Any] = {"private": private, "with_lens": not no_lens, "dry_run": dry_run}
    pushed = load(model, lens=lens).push_to_hub(name, **how, allow_licenses=allow_license or ())
    if dry_run:
        typer.echo(f"{pushed.card}\nFiles: " + ", ".join(pushed.files))
    else:
        typer.echo(pushed.url)
