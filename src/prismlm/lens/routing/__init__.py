"""Reading the channels of prototype mixers, and intervening on them."""

from prismlm.lens.routing.activations import Sequences, value_norms
from prismlm.lens.routing.clamp import ClampRouting, RoutingRecord, record_routing
from prismlm.lens.routing.curves import LayerCurves, TextCurves, read_channels, read_text
from prismlm.lens.routing.interventions import Intervention, MaskRead, MaskWrite, Reinitialise
from prismlm.lens.routing.lags import LagCorrelation, read_write_lags
from prismlm.lens.routing.locality import (
    Quartiles,
    RankCorrelation,
    quartiles,
    repetition,
    spearman,
)
from prismlm.lens.routing.measure import LayerMetrics, measure
from prismlm.lens.routing.mixers import half_life, half_lives
from prismlm.lens.routing.scope import intervene
from prismlm.lens.routing.top_sequences import (
    ChannelSequence,
    ChannelToken,
    TopSequences,
    rank_sequences,
    sequences_of,
)

__all__ = [
    "ChannelSequence",
    "ChannelToken",
    "ClampRouting",
    "Intervention",
    "LagCorrelation",
    "LayerCurves",
    "LayerMetrics",
    "MaskRead",
    "MaskWrite",
    "Quartiles",
    "RankCorrelation",
    "Reinitialise",
    "RoutingRecord",
    "Sequences",
    "TextCurves",
    "TopSequences",
    "half_life",
    "half_lives",
    "intervene",
    "measure",
    "quartiles",
    "rank_sequences",
    "read_channels",
    "read_text",
    "read_write_lags",
    "record_routing",
    "repetition",
    "sequences_of",
    "spearman",
    "value_norms",
]
