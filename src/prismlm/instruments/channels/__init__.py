"""Reading the channels of prototype mixers, and intervening on them."""

from prismlm.corpus.sequences import Sequences
from prismlm.edits.channels.clamp import ClampGates, GateRecord, record_gates
from prismlm.edits.channels.interventions import Intervention, MaskRead, MaskWrite, Reinitialise
from prismlm.edits.channels.scope import intervene
from prismlm.explain.chain import ChannelSource, ChannelUse, PrototypeChain
from prismlm.explain.direct_path import ActivationParts, DirectPath
from prismlm.explain.residual_stream import read_direct_path
from prismlm.instruments.channels.activations import value_norms
from prismlm.instruments.channels.build_report import ReportOptions, channel_report
from prismlm.instruments.channels.case_files import Case, Probe, case_sets, load_cases, probe_of
from prismlm.instruments.channels.concept_emergence import (
    ConceptInModel,
    TableOptions,
    concept_in_model,
)
from prismlm.instruments.channels.concepts import (
    ChannelScore,
    Concept,
    ConceptToken,
    RankedChannels,
    concept_tokens,
    find_channels,
    propose_concepts,
    rank_channels,
)
from prismlm.instruments.channels.curves import LayerCurves, TextCurves, read_channels, read_text
from prismlm.instruments.channels.effect_table import EffectCell, EffectTable, Summary
from prismlm.instruments.channels.effects import (
    INTERVENTIONS,
    draw_controls,
    effects_on,
    intervention_table,
)
from prismlm.instruments.channels.gate_use import GateUse, LayerUse, gate_uses
from prismlm.instruments.channels.heldout_cases import heldout_cases
from prismlm.instruments.channels.lags import LagCorrelation, read_write_lags
from prismlm.instruments.channels.layer_metrics import LayerMetrics, measure_layers
from prismlm.instruments.channels.locality import (
    Quartiles,
    RankCorrelation,
    quartiles,
    repetition,
    spearman,
)
from prismlm.instruments.channels.probabilities import target_probabilities
from prismlm.instruments.channels.report import ChannelReport
from prismlm.instruments.channels.token_gates import TokenGates, token_gates
from prismlm.instruments.channels.top_sequences import (
    ChannelSequence,
    ChannelToken,
    TopSequences,
    rank_sequences,
    sequences_of,
)
from prismlm.instruments.channels.word_forms import WordForms
from prismlm.models.decoders.mixers import half_life, half_lives, has_mixers, mixers_of

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
    "ClampGates",
    "Concept",
    "ConceptInModel",
    "ConceptToken",
    "DirectPath",
    "EffectCell",
    "EffectTable",
    "GateRecord",
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
    "RankedChannels",
    "Reinitialise",
    "ReportOptions",
    "Sequences",
    "Summary",
    "TableOptions",
    "TextCurves",
    "TokenGates",
    "TopSequences",
    "WordForms",
    "case_sets",
    "channel_report",
    "concept_in_model",
    "concept_tokens",
    "draw_controls",
    "effects_on",
    "find_channels",
    "gate_uses",
    "half_life",
    "half_lives",
    "has_mixers",
    "heldout_cases",
    "intervene",
    "intervention_table",
    "load_cases",
    "measure_layers",
    "mixers_of",
    "probe_of",
    "propose_concepts",
    "quartiles",
    "rank_channels",
    "rank_sequences",
    "read_channels",
    "read_direct_path",
    "read_text",
    "read_write_lags",
    "record_gates",
    "repetition",
    "sequences_of",
    "spearman",
    "target_probabilities",
    "token_gates",
    "value_norms",
]
