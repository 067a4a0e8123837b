"""prismlm inspect: how far a lens converged and how varied it is; what channels and heads do."""

from __future__ import annotations

from prismlm.cli.inspect.attention import attention
from prismlm.cli.inspect.channels import channels
from prismlm.cli.inspect.heads import heads, spectra
from prismlm.cli.inspect.index import index
from prismlm.cli.inspect.interventions import interventions
from prismlm.cli.inspect.prototypes import prototypes
from prismlm.cli.inspect.themes import themes
from prismlm.cli.inspect.uncertainty_feedback import uncertainty_feedback
from prismlm.cli.options import model_first

app = model_first(
    "index", "Measure what a lens holds: `prismlm inspect MODEL`; or what channels and heads do."
)
for command in (attention, prototypes, channels, interventions, heads, spectra, themes):
    app.command()(command)
for command in (uncertainty_feedback, index):
    app.command()(command)
