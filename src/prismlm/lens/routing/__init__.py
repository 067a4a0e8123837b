"""Reading the channels of prototype mixers, and intervening on them."""

from prismlm.lens.routing.activations import Sequences, value_norms
from prismlm.lens.routing.case_files import Case, Probe, case_sets, load_cases, probe_of
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
from prismlm.lens.routing.curves import LayerCurves, TextCurves, read_channels, read_text
from prismlm.lens.routing.effect_table import Effect, EffectTable, Summary
from prismlm.lens.routing.effects import (
    INTERVENTIONS,
    draw_controls,
    effects_on,
    intervention_table,
)
from prismlm.lens.routing.heldout_cases import heldout_cases
from prismlm.lens.routing.inspection import ConceptInModel, TableOptions, concept_in_model
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
from prismlm.lens.routing.probabilities import target_probabilities
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
    "Case",
    "ChannelScore",
    "ChannelSequence",
    "ChannelToken",
    "ClampRouting",
    "Concept",
    "ConceptInModel",
    "ConceptToken",
    "Effect",
    "EffectTable",
    "FoundChannels",
    "Intervention",
    "LagCorrelation",
    "LayerCurves",
    "LayerMetrics",
    "MaskRead",
    "MaskWrite",
    "Probe",
    "Quartiles",
    "RankCorrelation",
    "Reinitialise",
    "RoutingRecord",
    "Sequences",
    "Summary",
    "TableOptions",
    "TextCurves",
    "TokenGates",
    "TopSequences",
    "WordForms",
    "case_sets",
    "concept_in_model",
    "concept_tokens",
    "draw_controls",
    "effects_on",
    "find_channels",
    "found_in",
    "half_life",
    "half_lives",
    "heldout_cases",
    "intervene",
    "intervention_table",
    "load_cases",
    "measure",
    "probe_of",
    "propose_concepts",
    "quartiles",
    "rank_sequences",
    "read_channels",
    "read_text",
    "read_write_lags",
    "record_routing",
    "repetition",
    "sequences_of",
    "spearman",
    "target_probabilities",
    "token_gates",
    "value_norms",
]
