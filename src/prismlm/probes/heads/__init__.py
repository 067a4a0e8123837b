"""Attention heads: how far they reach, what they attend to, and signal against noise heads."""

from prismlm.probes.heads.attention import compare_groups, head_report, head_uses
from prismlm.probes.heads.spectra import (
    cross_terms,
    layer_rates,
    loss_against_length,
    read_states,
    spectra_report,
)

__all__ = [
    "compare_groups",
    "cross_terms",
    "head_report",
    "head_uses",
    "layer_rates",
    "loss_against_length",
    "read_states",
    "spectra_report",
]
