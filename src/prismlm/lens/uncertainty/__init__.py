"""Whether a model uses the uncertainty that is fed back to it: the checks of PRISMA."""

from prismlm.lens.uncertainty.ablation import Ablated, Ablation, ablation
from prismlm.lens.uncertainty.attention import AttentionProbe, LayerAttention, attention_probe
from prismlm.lens.uncertainty.bootstrap import Interval, bootstrap
from prismlm.lens.uncertainty.estimate import InspectEstimate, estimate_inspection
from prismlm.lens.uncertainty.hedging import Hedging, HedgingRun, hedging
from prismlm.lens.uncertainty.mistakes import AfterMistake, Mistakes, mistakes
from prismlm.lens.uncertainty.planning import CHECKS, InspectOptions, plan
from prismlm.lens.uncertainty.prefill import PassGap, PrefillGap, prefill_gap
from prismlm.lens.uncertainty.probe import CodeProbe, LayerProbe, code_probe
from prismlm.lens.uncertainty.recursion import own_codes, recursion
from prismlm.lens.uncertainty.report import CAVEAT, UncertaintyReport, inspect_uncertainty
from prismlm.lens.uncertainty.sample import Sample, corpus_sample, document_sample
from prismlm.lens.uncertainty.signal import Signal, replay

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
    "code_probe",
    "corpus_sample",
    "document_sample",
    "estimate_inspection",
    "hedging",
    "inspect_uncertainty",
    "mistakes",
    "own_codes",
    "plan",
    "prefill_gap",
    "recursion",
    "replay",
]
