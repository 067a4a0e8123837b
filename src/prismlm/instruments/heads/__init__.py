"""What the attention heads of a model do: how far they reach and what they look at."""

from prismlm.instruments.heads.comparison import (
    AcrossModels,
    Comparison,
    LayerDifference,
    across_models,
    compare_groups,
)
from prismlm.instruments.heads.head_use import HeadFigures, HeadUse, HeadUses, head_uses
from prismlm.instruments.heads.length import (
    LengthBucket,
    LossAgainstLength,
    loss_against_length,
    token_losses,
)
from prismlm.instruments.heads.rank_test import RankTest, sign_test, stratified_rank_test
from prismlm.instruments.heads.rates import Incoherence, LayerRates, Rates, layer_rates, rates_of
from prismlm.instruments.heads.report import HeadReport, head_report, write_heads
from prismlm.instruments.heads.resonance import (
    CrossTerms,
    Denominator,
    RatioTerms,
    cross_terms,
    denominators,
    own_cross_terms,
)
from prismlm.instruments.heads.spectra import SpectraOptions, SpectraReport, spectra_report
from prismlm.instruments.heads.states import (
    AttentionStates,
    read_states,
    read_states_and_heads,
    signal_noise_layers,
)
from prismlm.models.attention import HeadGroup, attention_layers, head_groups, reading_attention

__all__ = [
    "AcrossModels",
    "AttentionStates",
    "Comparison",
    "CrossTerms",
    "Denominator",
    "HeadFigures",
    "HeadGroup",
    "HeadReport",
    "HeadUse",
    "HeadUses",
    "Incoherence",
    "LayerDifference",
    "LayerRates",
    "LengthBucket",
    "LossAgainstLength",
    "RankTest",
    "Rates",
    "RatioTerms",
    "SpectraOptions",
    "SpectraReport",
    "across_models",
    "attention_layers",
    "compare_groups",
    "cross_terms",
    "denominators",
    "head_groups",
    "head_report",
    "head_uses",
    "layer_rates",
    "loss_against_length",
    "own_cross_terms",
    "rates_of",
    "read_states",
    "read_states_and_heads",
    "reading_attention",
    "sign_test",
    "signal_noise_layers",
    "spectra_report",
    "stratified_rank_test",
    "token_losses",
    "write_heads",
]
