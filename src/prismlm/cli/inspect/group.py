"""prismlm inspect: how far a lens converged and how varied it is; what channels and heads do."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from prismlm.cli.inspect.attention import attention
from prismlm.cli.inspect.channels import channels
from prismlm.cli.inspect.heads import heads
from prismlm.cli.inspect.index import index
from prismlm.cli.inspect.interventions import interventions
from prismlm.cli.inspect.prototypes import prototypes
from prismlm.cli.inspect.spectra import spectra
from prismlm.cli.inspect.themes import themes
from prismlm.cli.inspect.uncertainty_feedback import uncertainty_feedback

DEFAULT = "index"


class ModelFirst(TyperGroup):
    """Takes a first argument that is no command for the MODEL of ``inspect index``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command before a model."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ModelFirst,
    no_args_is_help=True,
    help="Measure what a lens holds: `prismlm inspect MODEL`; or what channels and heads do.",
)


@app.callback()
def _group() -> None:
    pass


app.command()(attention)
app.command()(prototypes)
app.command()(channels)
app.command()(interventions)
app.command()(heads)
app.command()(spectra)
app.command()(themes)
app.command()(uncertainty_feedback)
app.command(name=DEFAULT)(index)
