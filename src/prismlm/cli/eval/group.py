"""prismlm eval: benchmarks asked of a model and of its parts, and studies of models."""

from __future__ import annotations

import typer

from prismlm.cli.default_command import ModelFirst
from prismlm.cli.eval.glue import glue
from prismlm.cli.eval.judge import judge
from prismlm.cli.eval.pairs import pairs
from prismlm.cli.eval.robustness import clamping, robustness
from prismlm.cli.eval.suite import evaluate


class Eval(ModelFirst):
    """``prismlm eval MODEL`` is ``prismlm eval suite MODEL``."""

    default = "suite"


app = typer.Typer(
    cls=Eval,
    no_args_is_help=True,
    help="Ask benchmarks of a model: `prismlm eval MODEL`; or make a study of models.",
)


@app.callback()
def _group() -> None:
    pass


app.command(name=Eval.default)(evaluate)
app.command()(judge)
app.command()(glue)
app.command()(robustness)
app.command()(clamping)
app.command()(pairs)
