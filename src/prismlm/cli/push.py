"""prismlm push: a model directory with its lens and a card, on the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from prismlm.cli.options import Lens, Model, flag, option


def push(
    model: Model,
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Its name on the hub.")],
    lens: Lens = None,
    private: Annotated[
        bool, flag("--private", "Only its owners see it; a public one is refused.")
    ] = False,
    no_lens: Annotated[bool, flag("--no-lens", "Leave out the lens, and so all text.")] = False,
    allow_license: Annotated[
        list[str] | None,
        option("NAME", "Licence of text that you may pass on; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, flag("--dry-run", "Print the card and the names of the files; upload nothing.")
    ] = False,
) -> None:
    """Upload a model with its lens and a card to the Hugging Face Hub."""
    from prismlm.explain.language_model import load

    pushed = load(model, lens=lens).push_to_hub(
        name,
        private=private,
        with_lens=not no_lens,
        allow_licenses=allow_license or (),
        dry_run=dry_run,
    )
    if dry_run:
        typer.echo(pushed.card)
        typer.echo("Files: " + ", ".join(pushed.files))
    else:
        typer.echo(pushed.url)
