"""Reading the channels of prototype mixers, and intervening on them."""

from prismlm.lens.corpus_reading import Sequences
from prismlm.lens.routing.activations import value_norms
from prismlm.lens.routing.case_files import (
    Case,
    Probe,
    case_sets,
    load_cases,
    probe_of,
)
from prismlm.lens.routing.chain import ChannelSource, ChannelUse, PrototypeChain
from prismlm.lens.routing.clamp import ClampRouting, RoutingRecord, record_routing
from prismlm.lens.routing.concepts import (
    ChannelScore,
    Concept,
    ConceptToken,
    FoundChannels,
    concept_tokens,
    find_channels,
    found_in,
    propose_concepts,
)
from prismlm.lens.routing.curves import (
    LayerCurves,
    TextCurves,
    read_channels,
    read_text,
)
from prismlm.lens.routing.direct_path import ActivationParts, DirectPath
from prismlm.lens.routing.effect_table import Effect, EffectTable, Summary
from prismlm.lens.routing.effects import (
    INTERVENTIONS,
    draw_controls,
    effects_on,
    intervention_table,
)
from prismlm.lens.routing.gate_use import GateUse, LayerUse, gate_uses
from prismlm.lens.routing.heldout_cases import heldout_cases
from prismlm.lens.routing.inspection import ConceptInModel, TableOptions, concept_in_model
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
from prismlm.lens.routing.probabilities import target_probabilities
from prismlm.lens.routing.report import ChannelReport
from prismlm.lens.routing.reporting import ReportOptions, channel_report
from prismlm.lens.routing.residual_stream import read_direct_path
from prismlm.lens.routing.scope import intervene
from prismlm.lens.routing.token_gates import TokenGates, token_gates
from prismlm.lens.routing.top_sequences import (
    ChannelSequence,
    ChannelToken,
    TopSequences,
    rank_sequences,
    sequences_of,
)
from prismlm.lens.routing.word_forms import WordForms

__all__ = [
    "INTERVENTIONS",
    "ActivationParts",
    "Case",
    "ChannelReport",
    "ChannelScore",
    "ChannelSequence",
    "ChannelSource",
    "ChannelToken",
    "ChannelUse",
    "ClampRouting",
    "Concept",
    "ConceptInModel",
    "ConceptToken",
    "DirectPath",
    "Effect",
    "EffectTable",
    "FoundChannels",
    "GateUse",
    "Intervention",
    "LagCorrelation",
    "LayerCurves",
    "LayerMetrics",
    "LayerUse",
    "MaskRead",
    "MaskWrite",
    "Probe",
    "PrototypeChain",
    "Quartiles",
    "RankCorrelation",
    "Reinitialise",
    "ReportOptions",
    "RoutingRecord",
    "Sequences",
    "Summary",
    "TableOptions",
    "TextCurves",
    "TokenGates",
    "TopSequences",
    "WordForms",
    "case_sets",
    "channel_page",
    "channel_report",
    "concept_in_model",
    "concept_tokens",
    "draw_controls",
    "effects_on",
    "find_channels",
    "found_in",
    "gate_uses",
    "half_life",
    "half_lives",
    "has_mixers",
    "heldout_cases",
    "intervene",
    "intervention_table",
    "load_cases",
    "measure",
    "mixers_of",
    "probe_of",
    "propose_concepts",
    "quartiles",
    "rank_sequences",
    "read_channels",
    "read_direct_path",
    "read_text",
    "read_write_lags",
    "record_routing",
    "repetition",
    "sequences_of",
    "spearman",
    "target_probabilities",
    "token_gates",
    "value_norms",
    "write_page",
]
