"""prismlm inspect: how far a lens converged and how varied it is; what channels and heads do."""

from __future__ import annotations

import typer

from prismlm.cli.default_command import ModelFirst
from prismlm.cli.inspect.attention import attention
from prismlm.cli.inspect.channels import channels
from prismlm.cli.inspect.heads import heads
from prismlm.cli.inspect.index import index
from prismlm.cli.inspect.interventions import interventions
from prismlm.cli.inspect.prototypes import prototypes
from prismlm.cli.inspect.spectra import spectra
from prismlm.cli.inspect.themes import themes
from prismlm.cli.inspect.uncertainty_feedback import uncertainty_feedback


class Inspect(ModelFirst):
    """``prismlm inspect MODEL`` is ``prismlm inspect index MODEL``."""

    default = "index"


app = typer.Typer(
    cls=Inspect,
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
app.command(name=Inspect.default)(index)
