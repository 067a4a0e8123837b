"""What the attention heads of a model do: how far they reach and what they look at."""

from prismlm.probes.heads.resonance import cross_terms, own_cross_terms
from prismlm.probes.heads.spectra import SpectraOptions, loss_against_length, spectra_report
from prismlm.probes.heads.states import layer_rates, read_states, read_states_and_heads
from prismlm.probes.heads.use import (
    across_models,
    compare_groups,
    head_report,
    head_uses,
    write_heads,
)

__all__ = [
    "SpectraOptions",
    "across_models",
    "compare_groups",
    "cross_terms",
    "head_report",
    "head_uses",
    "layer_rates",
    "loss_against_length",
    "own_cross_terms",
    "read_states",
    "read_states_and_heads",
    "spectra_report",
    "write_heads",
]
