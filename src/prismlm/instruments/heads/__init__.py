"""What the attention heads of a model do: how far they reach and what they look at."""

from prismlm.instruments.heads.comparison import AcrossModels, Comparison, across_models
from prismlm.instruments.heads.head_use import HeadFigures, HeadUses
from prismlm.instruments.heads.length import LossAgainstLength
from prismlm.instruments.heads.rates import LayerRates, layer_rates
from prismlm.instruments.heads.report import (
    HeadReport,
    SpectraOptions,
    SpectraReport,
    head_report,
    spectra_report,
    write_heads,
)
from prismlm.instruments.heads.resonance import CrossTerms, RatioTerms, own_cross_terms
from prismlm.instruments.heads.states import read_states_and_heads

__all__ = [
    "AcrossModels",
    "Comparison",
    "CrossTerms",
    "HeadFigures",
    "HeadReport",
    "HeadUses",
    "LayerRates",
    "LossAgainstLength",
    "RatioTerms",
    "SpectraOptions",
    "SpectraReport",
    "across_models",
    "head_report",
    "layer_rates",
    "own_cross_terms",
    "read_states_and_heads",
    "spectra_report",
    "write_heads",
]
