"""Whether a model uses the uncertainty that is fed back to it: the checks of PRISMA."""

from prismlm.instruments.uncertainty_feedback.ablation import Ablated, Ablation, ablation
from prismlm.instruments.uncertainty_feedback.attention import (
    AttentionProbe,
    LayerAttention,
    attention_probe,
)
from prismlm.instruments.uncertainty_feedback.checks import CHECKS, InspectOptions, checks_for
from prismlm.instruments.uncertainty_feedback.estimate import InspectEstimate, estimate_inspection
from prismlm.instruments.uncertainty_feedback.hedging import Hedging, HedgingRun, hedging
from prismlm.instruments.uncertainty_feedback.mistakes import AfterMistake, Mistakes, mistakes
from prismlm.instruments.uncertainty_feedback.prefill import PassGap, PrefillGap, prefill_gap
from prismlm.instruments.uncertainty_feedback.probe import CodeProbe, LayerProbe, code_probe
from prismlm.instruments.uncertainty_feedback.recursion import own_codes, recursion
from prismlm.instruments.uncertainty_feedback.report import (
    CAVEAT,
    UncertaintyReport,
    inspect_uncertainty_feedback,
)
from prismlm.instruments.uncertainty_feedback.sample import Sample, corpus_sample, document_sample
from prismlm.instruments.uncertainty_feedback.signal import Signal, replay
from prismlm.statistics import Interval, bootstrap

__all__ = [
    "CAVEAT",
    "CHECKS",
    "Ablated",
    "Ablation",
    "AfterMistake",
    "AttentionProbe",
    "CodeProbe",
    "Hedging",
    "HedgingRun",
    "InspectEstimate",
    "InspectOptions",
    "Interval",
    "LayerAttention",
    "LayerProbe",
    "Mistakes",
    "PassGap",
    "PrefillGap",
    "Sample",
    "Signal",
    "UncertaintyReport",
    "ablation",
    "attention_probe",
    "bootstrap",
    "checks_for",
    "code_probe",
    "corpus_sample",
    "document_sample",
    "estimate_inspection",
    "hedging",
    "inspect_uncertainty_feedback",
    "mistakes",
    "own_codes",
    "prefill_gap",
    "recursion",
    "replay",
]
