"""Whether a model uses the uncertainty that is fed back to it: the checks of PRISMA."""

from prismlm.instruments.uncertainty_feedback.ablation import Ablation
from prismlm.instruments.uncertainty_feedback.attention import AttentionProbe
from prismlm.instruments.uncertainty_feedback.checks import estimate_inspection
from prismlm.instruments.uncertainty_feedback.hedging import Hedging, HedgingRun
from prismlm.instruments.uncertainty_feedback.mistakes import Mistakes
from prismlm.instruments.uncertainty_feedback.options import InspectOptions
from prismlm.instruments.uncertainty_feedback.prefill import PrefillGap
from prismlm.instruments.uncertainty_feedback.probe import CodeProbe
from prismlm.instruments.uncertainty_feedback.report import (
    CAVEAT,
    UncertaintyReport,
    inspect_uncertainty_feedback,
)
from prismlm.instruments.uncertainty_feedback.sample import Sample, corpus_sample, document_sample
from prismlm.instruments.uncertainty_feedback.signal import Signal

__all__ = [
    "CAVEAT",
    "Ablation",
    "AttentionProbe",
    "CodeProbe",
    "Hedging",
    "HedgingRun",
    "InspectOptions",
    "Mistakes",
    "PrefillGap",
    "Sample",
    "Signal",
    "UncertaintyReport",
    "corpus_sample",
    "document_sample",
    "estimate_inspection",
    "inspect_uncertainty_feedback",
]
