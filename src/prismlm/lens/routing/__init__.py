"""Reading the channels of prototype mixers, and intervening on them."""

from prismlm.lens.routing.activations import Sequences, value_norms
from prismlm.lens.routing.chain import ChannelSource, ChannelUse, PrototypeChain
from prismlm.lens.routing.curves import (
    LayerCurves,
    TextCurves,
    read_channels,
    read_text,
)
from prismlm.lens.routing.direct_path import ActivationParts, DirectPath
from prismlm.lens.routing.gate_use import GateUse, LayerUse, gate_uses
from prismlm.lens.routing.interventions import (
    Intervention,
    MaskRead,
    MaskWrite,
    Reinitialise,
)
from prismlm.lens.routing.lags import LagCorrelation, read_write_lags
from prismlm.lens.routing.locality import (
    Quartiles,
    RankCorrelation,
    quartiles,
    repetition,
    spearman,
)
from prismlm.lens.routing.measure import LayerMetrics, measure
from prismlm.lens.routing.mixers import (
    half_life,
    half_lives,
    has_mixers,
    mixers_of,
)
from prismlm.lens.routing.page import channel_page, write_page
from prismlm.lens.routing.report import ChannelReport
from prismlm.lens.routing.reporting import ReportOptions, channel_report
from prismlm.lens.routing.residual_stream import read_direct_path
from prismlm.lens.routing.scope import intervene
from prismlm.lens.routing.top_sequences import (
    ChannelSequence,
    ChannelToken,
    TopSequences,
    rank_sequences,
    sequences_of,
)

__all__ = [
    "ActivationParts",
    "ChannelReport",
    "ChannelSequence",
    "ChannelSource",
    "ChannelToken",
    "ChannelUse",
    "DirectPath",
    "GateUse",
    "Intervention",
    "LagCorrelation",
    "LayerCurves",
    "LayerMetrics",
    "LayerUse",
    "MaskRead",
    "MaskWrite",
    "PrototypeChain",
    "Quartiles",
    "RankCorrelation",
    "Reinitialise",
    "ReportOptions",
    "Sequences",
    "TextCurves",
    "TopSequences",
    "channel_page",
    "channel_report",
    "gate_uses",
    "half_life",
    "half_lives",
    "has_mixers",
    "intervene",
    "measure",
    "mixers_of",
    "quartiles",
    "rank_sequences",
    "read_channels",
    "read_direct_path",
    "read_text",
    "read_write_lags",
    "repetition",
    "sequences_of",
    "spearman",
    "value_norms",
    "write_page",
]
