"""prismlm eval: benchmarks asked of a model and of its parts, and studies of models."""

from __future__ import annotations

from prismlm.cli.eval.glue import glue
from prismlm.cli.eval.judge import judge
from prismlm.cli.eval.robustness import clamping, pairs, robustness
from prismlm.cli.eval.suite import evaluate
from prismlm.cli.options import model_first

app = model_first(
    "suite", "Ask benchmarks of a model: `prismlm eval MODEL`; or make a study of models."
)
app.command(name="suite")(evaluate)
for command in (judge, glue, robustness, clamping, pairs):
    app.command()(command)
