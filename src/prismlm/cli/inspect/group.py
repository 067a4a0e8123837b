"""prismlm inspect: how far a lens converged and how varied it is; what channels and heads do."""

from __future__ import annotations

from prismlm.cli.default_command import model_first
from prismlm.cli.inspect.attention import attention
from prismlm.cli.inspect.channels import channels
from prismlm.cli.inspect.heads import heads
from prismlm.cli.inspect.index import index
from prismlm.cli.inspect.interventions import interventions
from prismlm.cli.inspect.prototypes import prototypes
from prismlm.cli.inspect.spectra import spectra
from prismlm.cli.inspect.themes import themes
from prismlm.cli.inspect.uncertainty_feedback import uncertainty_feedback

app = model_first(
    "index", "Measure what a lens holds: `prismlm inspect MODEL`; or what channels and heads do."
)
app.command()(attention)
app.command()(prototypes)
app.command()(channels)
app.command()(interventions)
app.command()(heads)
app.command()(spectra)
app.command()(themes)
app.command()(uncertainty_feedback)
app.command()(index)
